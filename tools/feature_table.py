"""The table of what works in docs/guides/transformers.md, written from the marks of the tests that show it.

    @pytest.mark.shows("beam search", model="drop-in")
    @pytest.mark.shows("quantized cache", model="drop-in", refused=True)

Run without arguments to write the table. A test compares it with the marks.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
GUIDE = ROOT / "docs" / "guides" / "transformers.md"
BEGIN, END = "<!-- what works: written by tools/feature_table.py -->", "<!-- end of what works -->"
MODELS = {"drop-in": "drop-in", "decoder": "`LucidForCausalLM`"}

# (feature, model) -> whether it is refused
Features = dict[tuple[str, str], bool]


def read_marks(folder: Path = TESTS) -> Features:
    """The marks of all tests in the folder, without importing them."""
    found: Features = {}
    for file in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.shows":
                    _add(found, decorator, f"{file.name}: {node.name}" if isinstance(node, ast.FunctionDef) else "")
    return found


def _add(found: Features, mark: ast.Call, where: str) -> None:
    options = {each.arg: ast.literal_eval(each.value) for each in mark.keywords}
    if len(mark.args) != 1 or not set(options) <= {"model", "refused"} or options.get("model") not in MODELS:
        raise ValueError(f"{where}: expected shows(feature, model=one of {list(MODELS)}, refused=...)")
    key, refused = (ast.literal_eval(mark.args[0]), options["model"]), bool(options.get("refused"))
    if found.setdefault(key, refused) != refused:
        raise ValueError(f"{where}: {key[0]!r} is shown to work and to be refused with {key[1]!r}")


def render(found: Features) -> str:
    """The table in Markdown."""
    words = {None: "", False: "yes", True: "refused"}
    lines = ["| | " + " | ".join(MODELS.values()) + " |", "|---|" + "---|" * len(MODELS)]
    # What works comes first.
    for feature in sorted({feature for feature, _ in found}, key=lambda one: (_is_refused(found, one), one.lower())):
        lines.append(f"| {feature} | " + " | ".join(words[found.get((feature, model))] for model in MODELS) + " |")
    return "\n".join(lines)


def _is_refused(found: Features, feature: str) -> bool:
    return all(refused for (one, _), refused in found.items() if one == feature)


def replace_table(text: str, table: str) -> str:
    """The guide with this table between its marks."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{GUIDE.name} must have {BEGIN!r} and {END!r}, once each")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    new = replace_table(text, render(read_marks()))
    if "--check" in sys.argv[1:]:
        sys.exit(None if new == text else f"{GUIDE.name} is not current: run python tools/feature_table.py")
    GUIDE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
