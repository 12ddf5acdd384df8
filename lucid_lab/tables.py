"""Tables of text for the terminal."""

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]], *, rule: bool = False) -> str:
    """Rows in aligned columns; the first row is the heading. rule: a line of dashes below the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    dashes = [["-" * width for width in widths]] if rule else []
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (rows[0], *dashes, *rows[1:])
    )
