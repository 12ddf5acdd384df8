#!/bin/sh
# Table 1: training overhead of Gemma 3 1B and 4B and Qwen 2.5 1.5B. The paper gives no lengths: 2048 tokens here.
# Gemma 3 4B does not fit 80 GB with a copy of the model on each GPU, so its parts are divided (fsdp).
. "$(dirname "$0")/settings.sh"
tokens
for preset in gemma3_1b gemma3_4b qwen2_5_1_5b; do
  LAYERS=6 PARALLEL=ddp CHANGES="--set batch_size=64 --set micro_batch_size=2"
  if [ $preset = gemma3_4b ] && [ "$SCALE" = full ]; then PARALLEL=fsdp; fi
  # A preset of a published model keeps its vocabulary, whatever the data have.
  if [ "$SCALE" = tiny ]; then CHANGES="--set model.vocab_size=2500"; fi
  for arm in $(arms softmax lucid); do
    everywhere train pretrain_2k --set preset=$preset $(options $arm) --data "$DATA/dolma" --parallel $PARALLEL \
      --out "$MODELS/$preset-$arm" --set sequence_length=$L2 --set steps=50 --set evaluation_sequences=8 $CHANGES $TINY
  done
done
report table1 "$MODELS"/gemma3_* "$MODELS"/qwen2_5_*
