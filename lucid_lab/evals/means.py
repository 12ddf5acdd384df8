"""Means over the cells of an evaluation: over the tasks of a family, as the paper reports them, and over lengths."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .cells import EvalError, Labels
from .results import Summary

# (first, last) of the lengths, in tokens.
Range = tuple[int, int]
TASK, NEEDLES, LENGTH = "task", "needles", "length"


def means(cells: Sequence[Summary], ranges: Sequence[Range] = ()) -> list[Summary]:
    """Means over cells of one family, each cell with the same weight.

    Of a family whose cells have a label "task" and others: the mean over the tasks, for all values of the others. With
    several numbers of needles: the mean over tasks and needles, too, for every length.
    For every range of lengths: the mean over all tasks, needles and lengths in it, where it holds more than one length.
    over: the labels that a mean is taken over, with their values. cells: the names of its cells.
    """
    found = []
    for family in dict.fromkeys(cell["family"] for cell in cells):
        members = [cell for cell in cells if cell["family"] == family]
        labels = members[0]["labels"]
        if TASK in labels and len(labels) > 1:
            found += _means_over([TASK], members)
        if len({cell["labels"].get(NEEDLES) for cell in members}) > 1 and LENGTH in labels:
            found += _means_over([label for label in labels if label != LENGTH], members)
        for first, last in ranges:
            inside = [cell for cell in members if first <= cell["labels"].get(LENGTH, -1) <= last]
            if len({cell["labels"][LENGTH] for cell in inside}) > 1:
                found.append(_mean(inside, {LENGTH: f"{first}-{last}"}, list(labels)))
    return found


def _means_over(over: list[str], cells: Sequence[Summary]) -> list[Summary]:
    groups: dict[tuple[object, ...], list[Summary]] = {}
    for cell in cells:
        groups.setdefault(tuple(_without(cell["labels"], over).values()), []).append(cell)
    return [_mean(group, _without(group[0]["labels"], over), over) for group in groups.values()]


def check_ranges(ranges: Sequence[Range], lengths: Iterable[Any]) -> None:
    """Refuse a range without lengths to take a mean over."""
    known = set(lengths)
    for first, last in ranges:
        if len([length for length in known if first <= length <= last]) < 2:
            raise EvalError(
                f"--mean-lengths {first}-{last} must hold two lengths or more that are asked, got "
                f"{', '.join(map(str, sorted(known))) or 'none'}"
            )


def _without(labels: Labels, names: Sequence[str]) -> Labels:
    return {label: value for label, value in labels.items() if label not in names}


def _mean(cells: Sequence[Summary], labels: Labels, over: list[str]) -> Summary:
    # The samples of different cells are independent, so the squares of their errors add up.
    errors = [cell["standard_error"] for cell in cells]
    known = [error for error in errors if error is not None]
    return {
        "family": cells[0]["family"],
        "metric": cells[0]["metric"],
        "labels": labels,
        "over": {label: list(dict.fromkeys(cell["labels"][label] for cell in cells)) for label in over},
        "cells": [cell["name"] for cell in cells],
        "samples": sum(cell["samples"] for cell in cells),
        "out_of": cells[0]["out_of"],
        "mean": math.fsum(cell["mean"] for cell in cells) / len(cells),
        "standard_error": math.hypot(*known) / len(cells) if len(known) == len(cells) else None,
    }
