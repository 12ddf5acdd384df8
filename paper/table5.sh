#!/bin/sh
# Table 5: variants of LUCID on M-NIAH at 2048 tokens. β = 2·sigmoid as the authors' code has it; paper: sigmoid.
. "$(dirname "$0")/settings.sh"
ARMS=$(arms lucid qk_norm row_max learn_beta)
tokens
for arm in $ARMS; do
  pretrain $arm
  mniah 2k-$arm 2,4,6,8,10 $L2
done
report table5 $(for arm in $ARMS; do scores 2k-$arm; done)
