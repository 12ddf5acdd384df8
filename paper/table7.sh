#!/bin/sh
# Table 7: softmax attention with 10 % more steps at 64K, next to both models of Table 6.
. "$(dirname "$0")/settings.sh"
tokens
for arm in softmax lucid; do
  pretrain $arm
  tune $arm 64k-$arm
done
tune softmax 64k-softmax-10_percent --set steps=550
for name in 64k-softmax 64k-softmax-10_percent 64k-lucid; do
  sniah $name $L4,$L8
  sniah $name $L16 $FEW 1
  mniah $name 4 $L8
  mniah $name 4 $L16,$L32 $FEW 1
done
report table7 $(scores 64k-softmax 64k-softmax-10_percent 64k-lucid)
