#!/bin/sh
# Figure 7 and the losses of A.5: the 16-layer model at 4096 and 32 768 tokens; heads of 16 at 4096; no RoPE at 32 768.
. "$(dirname "$0")/settings.sh"
alone tokenize "$LARGE_DOLMA" "$LARGE" --tokenizer $LARGE_TOKENIZER --seed 0 \
  $([ "$SCALE" = tiny ] && echo --validation 0.2 || echo --limit-tokens 81000000000 --validation 0.001)
run() {  # run NAME RECIPE LENGTH [CHANGE...]
  name=$1 recipe=$2 length=$3; shift 3
  for arm in $(arms softmax lucid); do
    everywhere train $recipe $(options $arm) --data "$LARGE" --out "$MODELS/$name-$arm" --parallel $PARALLEL \
      --set sequence_length=$length "$@" $TINY
  done
}
run context_4k context_4k $L4
run context_32k context_32k $L32
run heads_of_16 context_4k $L4 --set model.num_attention_heads=128 --set model.num_key_value_heads=128 \
  --set model.head_dim=16
run no_rope_32k context_32k $L32 --set model.rope_parameters=null
report figure7 "$MODELS"/context_* "$MODELS"/heads_of_16-* "$MODELS"/no_rope_32k-*
