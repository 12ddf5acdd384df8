#!/bin/sh
# §2.3: 100 new tokens at a context of 32K, batch 1 (77 ms against 76 ms); also training steps on one GPU.
. "$(dirname "$0")/settings.sh"
alone bench on_device --out "$RUNS/on_device" $([ "$SCALE" = tiny ] && echo --quick --device cpu)
helper compare.py decoding "$RUNS" "$L2 $L32"
