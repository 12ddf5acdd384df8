#!/bin/sh
# Figure 4: M-NIAH by needles and length, softmax attention and LUCID, after tuning at 64K.
. "$(dirname "$0")/settings.sh"
ARMS=$(arms softmax lucid)
tokens
for arm in $ARMS; do
  pretrain $arm
  tune $arm 64k-$arm
  mniah 64k-$arm 2,4,6,8,10 $UP_TO_8K
done
report figure4 $(for arm in $ARMS; do scores 64k-$arm; done)
