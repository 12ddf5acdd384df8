"""Scales: how much of an experiment is run."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Scale:
    """How much of every experiment is run. Settings of one experiment are in its file.

    name: on the command line, in results and in the names of their folders.
    about: the purpose of the scale, in a few words.
    seeds: every run is repeated with each of them.
    every_attention: where attentions are compared, all of ATTENTIONS take part; otherwise two or three.
    tiny: sizes that only show that an experiment runs. Nothing is learned, so the claim is not judged.
    demo: for `lucid demo`: the main comparison of an experiment, without its further controls.
    model, texts: folders of a checkpoint and of long texts, for the experiments that need them.
    """

    name: str
    about: str
    seeds: tuple[int, ...] = ()
    every_attention: bool = True
    tiny: bool = False
    demo: bool = False
    model: str = field(default="", compare=False)
    texts: str = field(default="", compare=False)


SMOKE = Scale("smoke", "does it run (seconds)", seeds=(0,), every_attention=False, tiny=True)
SMALL = Scale("small", "minutes on two cores, several seeds, a verdict", seeds=(0, 1, 2))
HOURS = Scale("hours", "tasks in words and variants, trained for longer: 92 minutes of one core", seeds=(0, 1, 2))
# The experiments that have runs of their own at HOURS; most of their sizes are in `staged/sizes.py`.
HAVE_HOURS = ("needle_lm", "babilong", "variants")
# The full recipe is a list of commands, `paper()` of an experiment: nothing is planned at these scales.
PAPER = Scale("paper", "the full recipe, for a cluster")
REHEARSAL = Scale("rehearsal", "every command of the full recipe made small, on two cores", tiny=True)
# `lucid demo --full` and `lucid demo`.
DEMO = Scale("demo", "9 to 16 minutes on two cores", seeds=(0, 1, 2), demo=True)
QUICK = Scale("quick", "one to three minutes on two cores", seeds=(0,), every_attention=False, demo=True)

# The choices of `lucid experiment --scale`.
SCALES = {scale.name: scale for scale in (SMOKE, SMALL, HOURS, REHEARSAL, PAPER)}
# Those whose experiments are lists of commands.
COMMANDS = (REHEARSAL, PAPER)
