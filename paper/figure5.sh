#!/bin/sh
# Figure 5: tuning at 32K and at 64K, with as many tokens in a step; M-NIAH with 4 needles, means over 2K-8K and 2K-32K.
. "$(dirname "$0")/settings.sh"
ARMS=$(arms softmax lucid)
tokens
for arm in $ARMS; do
  pretrain $arm
  tune $arm 32k-$arm --set sequence_length=$L32 --set batch_size=32 --set micro_batch_size=1
  tune $arm 64k-$arm
  for name in 32k-$arm 64k-$arm; do
    mniah $name 4 $UP_TO_8K
    mniah $name 4 $L16,$L32 $FEW 1
  done
done
report figure5 $(for arm in $ARMS; do scores 32k-$arm 64k-$arm; done)
