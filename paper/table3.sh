#!/bin/sh
# Table 3: M-NIAH at 2048 tokens with 2, 4 and 6 needles, five attentions, after pretraining.
. "$(dirname "$0")/settings.sh"
ARMS=$(arms softmax diff delta path lucid)
tokens
for arm in $ARMS; do
  pretrain $arm
  mniah 2k-$arm 2,4,6 $L2
done
report table3 $(for arm in $ARMS; do scores 2k-$arm; done)
