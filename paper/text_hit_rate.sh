#!/bin/sh
# §4.5: softmax weight on the answer, in prompts of M-NIAH with 4 needles (0.2845 against 0.1817; no length is given).
. "$(dirname "$0")/settings.sh"
ARMS=$(arms softmax lucid)
tokens
for arm in $ARMS; do
  pretrain $arm
  [ -e "$DATA/needles.jsonl" ] || alone make-data needles "$DATA/needles.jsonl" --needles 4 --lengths $L2 --samples 10 \
    --haystack "$ESSAYS" --tokenizer "$MODELS/2k-$arm/model"
  for line in $([ "$SCALE" = tiny ] && echo 1 || seq 10); do
    helper compare.py prompt "$DATA/needles.jsonl" $line "$RUNS/prompt"
    alone analyze "$MODELS/2k-$arm/model" --what hit_rate --text "$RUNS/prompt.txt" --length $L2 \
      --find "$(cat "$RUNS/prompt.answer" 2>/dev/null || echo ANSWER)" --out "$RUNS/hit_rate/$arm/$line"
  done
done
report hit_rate $(for arm in $ARMS; do echo "$RUNS/hit_rate/$arm"; done)
