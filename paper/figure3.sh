#!/bin/sh
# Figure 3: two tasks in turn. "authors" in the tables is the protocol of their script, in minutes of a CPU.
. "$(dirname "$0")/settings.sh"
SIZE=$([ "$SCALE" = tiny ] && echo smoke || echo small)
alone experiment learnability --scale $SIZE --out "$RUNS/learnability"
report figure3 "$RUNS/learnability"
