#!/bin/sh
# Figure 2: κ of P against the length, in LUCID's model after tuning at 64K, on held-out text.
. "$(dirname "$0")/settings.sh"
tokens
pretrain lucid
tune lucid 64k-lucid
alone analyze "$MODELS/64k-lucid/model" --what conditioning --tokens-from "$DATA/dolma" --length $L64 \
  --lengths $L2,$L4,$L8,$L16,$L32,$L64 --out "$RUNS/kappa"
report figure2 "$RUNS/kappa"
