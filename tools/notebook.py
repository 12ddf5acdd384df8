"""Execute the notebook of examples/ and store its outputs, so that GitHub and the site show them.

make notebook
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def main() -> int:
    """Execute every notebook in place. Returns the exit code."""
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        where = {"metadata": {"path": path.parent}}
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
        for cell in notebook.cells:
            # Leave out what belongs to the machine: times of execution, warnings with its paths.
            cell.metadata = {}
            if cell.cell_type == "code":
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
        nbformat.write(notebook, path)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1024} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
