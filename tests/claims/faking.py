"""Records of the old engine for the tests of `pretrained`, computed in this process."""

from pathlib import Path
from typing import Any

from lucid_lab.claims.engine.jobs import Store
from lucid_lab.claims.engine.pool import do
from lucid_lab.claims.engine.scale import Scale


def compute(experiment: Any, scale: Scale, folder: Path) -> Store:
    """The records of all jobs that an experiment plans, run in this process."""
    store = Store(folder)
    while fresh := [job for job in experiment.plan(scale, store) if job not in store]:
        for job in fresh:
            log = do(job, folder)
            assert log is None, Path(log).read_text()
    return store
