#!/bin/sh
# Table 4: LongBench and SCROLLS, eight attentions, each tuned on prompts from its 2K model.
# authors: trained on all rows of 2WikiMQA and MultifieldQA, and scored on the same rows. paper: halves (A.6).
. "$(dirname "$0")/settings.sh"
ARMS=$(arms softmax diff delta gla gsa path lucid lucid_path)
tokens
prompts longbench longbench --part $([ $PART = all ] && echo all || echo train) $LONGQA
prompts qasper qasper $LONGQA
prompts qmsum qmsum $LONGQA
EPOCHS=--set\ steps=$([ $PART = all ] && echo 262 || echo 131)
for arm in $ARMS; do
  pretrain $arm
  tune_on longbench $arm $EPOCHS
  tune_on qasper $arm
  tune_on qmsum $arm
  evaluate longbench-$arm --tasks longbench --part $PART --max-length $CUT --batch-size 8 $LONGQA
  evaluate qasper-$arm --tasks scrolls --variants qasper --max-length $CUT --batch-size 8 $LONGQA
  evaluate qmsum-$arm --tasks scrolls --variants qmsum --max-length $CUT --batch-size 8 $LONGQA
done
report table4 $(for arm in $ARMS; do scores longbench-$arm qasper-$arm qmsum-$arm; done)
