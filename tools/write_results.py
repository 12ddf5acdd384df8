"""Write the pages of published results again: docs/rules.md, and docs/results_NAME.md from docs/records/NAME.

    python tools/write_results.py

To publish a run, copy the result.json of its experiments to docs/records/NAME/EXPERIMENT-SCALE/ and run this.
"""

from pathlib import Path

from lucid_attention.files import write_whole
from lucid_lab.claims.engine import rules
from lucid_lab.report.page import markdown
from lucid_lab.report.records import read_results

DOCS = Path(__file__).parents[1] / "docs"


def pages(docs: Path = DOCS) -> dict[Path, str]:
    """The pages by their files."""
    found = {docs / "rules.md": rules.page()}
    for folder in sorted((docs / "records").glob("*/")):
        title = f"Results: {folder.name}"
        found[docs / f"results_{folder.name}.md"] = markdown(read_results([folder]), title)
    return found


if __name__ == "__main__":
    for file, content in pages().items():
        print(write_whole(file, content))
