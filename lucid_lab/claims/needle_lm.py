"""§4.2: needles in a haystack, as text.

The paper (table "MNIAH task at 2048 sequence length"): with 2, 4 and 6 needles standard attention finds 74.2, 51.0 and
38.8 %, LUCID 76.6, 55.8 and 43.6 %; over needles and lengths LUCID is 10 to 26 % ahead.

Here: small models train on RULER's prompts and are asked others of them by the evaluation harness. One needle is
S-NIAH.

At `--scale hours` smaller models read words instead of pieces of words and learn in stages, from one needle to many:
all attentions of the paper's table and LUCID-PaTH, up to four times the length of training.
"""

from collections.abc import Sequence

from .engine.against import explain_against, judge_against
from .engine.full_scale import cell_text
from .engine.jobs import Job
from .engine.result import Claim, Conclusion, Figure, Spread, Table, bar, bars, heatmaps, table
from .engine.scale import HOURS, Scale
from .engine.steps import Step, evaluate, pretrained, tuned, unique
from .engine.study import Done
from .engine.verdict import Lead, Measured, PaperNumber, Place, Verdict, judge_leads, lead
from .staged.comparison import Contest
from .staged.sizes import HOURS_SIZES
from .text.comparison import ARMS, LOSS, Cell, Comparison, judge, percent
from .text.training import TextRun

CLAIM = Claim(
    title="More needles are found in a haystack of text",
    section="4.2",
    says="LUCID retrieves better than standard attention for all numbers of needles and lengths, with the largest "
    "gains where the task is hardest.",
    paper="M-NIAH at 2048 tokens with 2, 4, 6 needles: standard 74.2, 51.0, 38.8 %, LUCID 76.6, 55.8, 43.6 %; over "
    "needles and lengths LUCID is 10–26 % ahead",
)
PAPER_NEEDLES = (2, 4, 6)
PAPER = {
    "softmax": ("Standard", (74.2, 51.0, 38.8)),
    "diff": ("Diff Trans.", (72.4, 35.4, 26.0)),
    "delta": ("DeltaNet", (37.0, 16.8, 11.0)),
    "path": ("PaTH", (61.4, 44.2, 37.2)),
    "lucid": ("LUCID", (76.6, 55.8, 43.6)),
}
NEEDLES = (2, 4, 6, 8, 10)
# The means of Figure 5, over tasks, needles and these lengths.
AVERAGES = "--mean-lengths=2048-8192,2048-32768"
# Table "SNIAH and MNIAH ... after fine-tuning", 2K to 64K tokens.
TUNED_LENGTHS = (2048, 4096, 6144, 8192, 16_384, 32_768, 65_536)
# The names of the tasks in `lucid eval`.
TASKS = {"S-NIAH": "sniah", "M-NIAH": "mniah"}
TUNED = {
    ("S-NIAH", "Standard"): (55.9, 47.5, 32.5, 19.3, 2.0, 0.0, 2.0),
    ("S-NIAH", "LUCID"): (62.2, 68.6, 68.2, 50.2, 15.0, 1.0, 2.0),
    ("M-NIAH", "Standard"): (33.6, 37.4, 26.0, 23.2, 4.0, 4.0, 2.0),
    ("M-NIAH", "LUCID"): (51.6, 51.4, 40.4, 33.2, 14.0, 12.0, 2.0),
}

# Table 3, by attention and needles; Table 6, by task, attention and length. Table 6 does not give its needles: here its
# M-NIAH is the mean over 2 to 10.
AT_2K = {
    (key, n): PaperNumber(
        "Table 3", f"{name}, {n} needles", value, Place(f"needles_2k-{key}", "mniah", cell_text(needles=n, length=2048))
    )
    for key, (name, values) in PAPER.items()
    for n, value in zip(PAPER_NEEDLES, values, strict=True)
}
AT_64K = {
    (task, name, length): PaperNumber(
        "Table 6",
        f"{task}, {name}, {length} tokens",
        value,
        Place(f"needles_64k-{'lucid' if name == 'LUCID' else 'softmax'}", TASKS[task], cell_text(length=length)),
    )
    for (task, name), values in TUNED.items()
    for length, value in zip(TUNED_LENGTHS, values, strict=True)
}
PAPER_NUMBERS = (*AT_2K.values(), *AT_64K.values())


def judge_paper(measured: Measured) -> Verdict:
    """LUCID is ahead of standard attention at 2K and tuned at 64K, with one needle and with many; and of the others."""

    def ahead(other: str) -> Lead:
        lucid, others = ([AT_2K[key, n] for n in PAPER_NEEDLES] for key in ("lucid", other))
        return lead(f"LUCID − {PAPER[other][0]} at 2K", lucid, others, measured)

    def tuned(task: str) -> Lead:
        lucid, standard = ([AT_64K[task, name, length] for length in TUNED_LENGTHS] for name in ("LUCID", "Standard"))
        return lead(f"LUCID − Standard tuned at 64K, {task}", lucid, standard, measured)

    main = [ahead("softmax"), *map(tuned, TASKS)]
    return judge_leads(main, [ahead(other) for other in PAPER if other not in ("softmax", "lucid")])


def comparison(scale: Scale) -> Comparison:
    """The runs of a scale."""
    smoke = scale.tiny
    needles, lengths = ((1, 2), (256,)) if smoke else ((1, 2, 4), (256, 384))
    steps, batch = (4, 4) if smoke else (300, 8)
    base = TextRun(
        texts={
            "kind": "needles",
            "settings": {"needles": needles, "keys": "words", "length": 256},
            "samples": 200 if smoke else steps * batch,
            "vocabulary": 700,
        },
        asked={
            "tasks": ("mniah",),
            "options": {
                "needles": needles,
                "variants": ("multikey_1",),
                "lengths": lengths,
                "samples": 2 if smoke else 50,
                "haystack": "noise",
                "answer_tokens": 10,
            },
        },
        model={"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32} if smoke else {},
        sequence_length=256,
        steps=steps,
        batch=batch,
    )
    return Comparison(base, seeds=scale.seeds, milliseconds=(95, 125), equal_time=not smoke)


def contest(scale: Scale) -> Contest:
    """The runs of `--scale hours`."""
    return Contest(HOURS_SIZES["needle_lm"], scale.seeds)


def plan(scale: Scale, done: Done) -> list[Job]:
    """Texts; then models."""
    return contest(scale).plan(done) if scale is HOURS else comparison(scale).plan(done)


def conclude(scale: Scale, done: Done) -> Conclusion:
    """The verdict rests on the mean over the cells with more than one needle."""
    if scale is HOURS:
        return conclude_hours(contest(scale), done)
    runs = comparison(scale)
    several = {
        arm: percent(runs.score(done, arm, "score", lambda cell: cell["labels"]["needles"] > 1)) for arm in runs.arms
    }
    verdict, because = judge(several, floor=10, ceiling=95, what="Answers found among several needles")
    ours = "; ".join(f"{ARMS[arm].title} {several[arm]} %" for arm in runs.arms)
    return Conclusion(
        ours=f"several needles: {ours}",
        verdict=verdict,
        because=because,
        seeds=len(runs.seeds),
        figures=[_maps(runs, done), _bars(runs, done), runs.learning_curves(done, "to find needles")],
        tables=[_table(runs, done), _paper_table(), _tuned_table()],
    )


# An arm has learned the task at `--scale hours` from this share of single needles on, at the length of training; and it
# tells needles apart from this many points on above picking any of them.
ONE_NEEDLE, APART = 90.0, 10.0


def conclude_hours(runs: Contest, done: Done) -> Conclusion:
    """LUCID and LUCID-PaTH against every baseline, over all lengths, with several needles."""
    run = runs.size.run
    several, members = run.test_n[1:], {member.key: member for member in runs.members(done)}
    scores = {key: runs.score(done, member, several, run.test_lengths) for key, member in members.items()}
    single = max(runs.score(done, member, run.test_n[:1], run.test_lengths[:1]).mean for member in members.values())
    guess = sum(100 / n for n in several) / len(several)
    standard = {key: score for key, score in scores.items() if key.startswith("softmax")}
    others = {key: score for key, score in scores.items() if not key.startswith(("softmax", "lucid"))}
    floor = guess + APART if single >= ONE_NEEDLE else 100.0
    titled = {members[key].label: score for key, score in (standard | others).items()}
    because = f"Answers found among {several[0]} to {several[-1]} needles, mean over {run.test_lengths[0]} to "
    because += f"{run.test_lengths[-1]} tokens; any needle would give {guess:.0f} %. "
    because += " ".join(
        explain_against(members[key].label, scores[key], titled) for key in ("lucid", "lucid_path") if key in scores
    )
    because += f" One needle: at best {single:.1f} % at {run.test_lengths[0]} tokens."
    ours = "; ".join(f"{member.label} {scores[key]} %" for key, member in members.items())
    names = ["needles", *map(str, run.test_n)]
    return Conclusion(
        ours=f"several needles: {ours}",
        verdict=judge_against(scores["lucid"], standard, others, floor=floor),
        because=because,
        seeds=len(runs.seeds),
        figures=[_hours_maps(runs, done), runs.curves(done, "Learning to find needles")],
        tables=[runs.table(done, "Answers found here", names, HOURS_NOTE), _paper_table(), _tuned_table()],
    )


HOURS_NOTE = (
    "Percent of the answers, mean ± standard deviation over seeds. Trained up to the first length. Seconds are "
    "those of a processor for one training. All arms have a token shift on keys and values."
)


def _hours_maps(runs: Contest, done: Done) -> Figure:
    run = runs.size.run
    panels = {
        member.label: (
            run.test_n,
            run.test_lengths,
            [[runs.score(done, member, (n,), (length,)).mean for length in run.test_lengths] for n in run.test_n],
        )
        for member in runs.members(done)
    }
    note = f"Trained with at most {run.test_lengths[0]} tokens; mean over seeds."
    return heatmaps("Answers found", "needles", "tokens", panels, range=(0, 100), unit="%", note=note)


def found(runs: Comparison, done: Done, arm: str, needles: int, length: int | None = None) -> Spread:
    """Percent of answers found in a cell, or in all cells with this number of needles."""

    def selected(cell: Cell) -> bool:
        return cell["labels"]["needles"] == needles and length in (None, cell["labels"]["length"])

    return percent(runs.score(done, arm, "score", selected))


def _cells(runs: Comparison) -> tuple[tuple[int, ...], tuple[int, ...]]:
    options = runs.base.asked["options"]
    return options["needles"], options["lengths"]


def _maps(runs: Comparison, done: Done) -> Figure:
    needles, lengths = _cells(runs)
    panels = {
        ARMS[arm].title: (
            needles,
            lengths,
            [[found(runs, done, arm, n, length).mean for length in lengths] for n in needles],
        )
        for arm in runs.arms
    }
    trained = runs.base.sequence_length
    return heatmaps(
        "Answers found",
        "needles",
        "tokens",
        panels,
        range=(0, 100),
        unit="%",
        note=f"Trained with at most {trained} tokens; mean over seeds.",
    )


def _bars(runs: Comparison, done: Done) -> Figure:
    needles, _ = _cells(runs)
    groups = {
        f"{n} needle{'s' if n > 1 else ''}": [
            bar(ARMS[arm].title, ARMS[arm].role, found(runs, done, arm, n)) for arm in runs.arms
        ]
        for n in needles
    }
    note = "Mean over lengths. Picking any needle would give a share of one by their number."
    return bars("Answers found, by number of needles", "answers found, %", groups, range=(0, 100), note=note)


def _table(runs: Comparison, done: Done) -> Table:
    needles, lengths = _cells(runs)
    rows = [
        [ARMS[arm].title, n, *(found(runs, done, arm, n, length) for length in lengths), runs.loss(done, arm)]
        for arm in runs.arms
        for n in needles
    ]
    columns = ["attention", "needles", *(f"{length} tokens" for length in lengths), LOSS]
    note = f"Percent of the answers, mean ± standard deviation over seeds. {runs.time_note(done)}"
    return table("Answers found here", columns, rows, note=note)


def _paper_table() -> Table:
    rows = [[name, *values] for name, values in PAPER.values()]
    return table("The paper's: 1B models, 2048 tokens", ["attention", *(f"{n} needles" for n in PAPER_NEEDLES)], rows)


def _tuned_table() -> Table:
    columns = ["task", "attention", *(f"{length // 1024}K" for length in TUNED_LENGTHS)]
    rows = [[*names, *values] for names, values in TUNED.items()]
    return table("The paper's after fine-tuning at 64K, by length", columns, rows)


def asked(lengths: Sequence[int]) -> tuple[str, ...]:
    """The needles of §4.2, the same for every model: RULER's tasks and essays, 500 samples, as in RULER."""
    needles = f"--needles={','.join(map(str, NEEDLES))}"
    return needles, f"--lengths={','.join(map(str, lengths))}", "--samples=500", "--haystack=essays"


def ask_tuned(model: str, out: str) -> Step:
    """S-NIAH and M-NIAH of a model tuned at 64K, at 2K to 64K, with the averages of the figure of tuning lengths."""
    return evaluate(f"{model}/model", "sniah,mniah", f"results/paper/{out}", *asked(TUNED_LENGTHS), AVERAGES)


def tuned_64k(attention: str) -> list[Step]:
    """Pretraining, tuning at 64K and needles: Tables 6 and 7, the heat map and one side of Figure 5 share them."""
    return [*tuned(attention), ask_tuned(f"runs/paper/finetune_64k-{attention}", f"needles_64k-{attention}")]


def paper() -> list[Step]:
    """Every attention of the table: pretraining, needles at 2048; then tuning at 65 536, needles at 2K to 64K."""
    steps = []
    for attention in PAPER:
        model, out = f"runs/paper/pretrain_2k-{attention}/model", f"results/paper/needles_2k-{attention}"
        steps += [*pretrained(attention), evaluate(model, "mniah", out, *asked((2048,))), *tuned_64k(attention)]
    return unique(steps)
