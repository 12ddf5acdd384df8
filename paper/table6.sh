#!/bin/sh
# Table 6: S-NIAH and M-NIAH (4 needles) after tuning at 64K; 500 samples up to 8K, 50 from 16K on.
. "$(dirname "$0")/settings.sh"
ARMS=$(arms softmax lucid)
tokens
for arm in $ARMS; do
  pretrain $arm
  tune $arm 64k-$arm
  mniah 64k-$arm 4 $UP_TO_8K
  mniah 64k-$arm 4 $FROM_16K $FEW 1
  sniah 64k-$arm $UP_TO_8K
  sniah 64k-$arm $FROM_16K $FEW 1
done
report table6 $(for arm in $ARMS; do scores 64k-$arm; done)
