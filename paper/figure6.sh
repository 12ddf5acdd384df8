#!/bin/sh
# Figure 6: BABILong QA1 to QA5 at 32K, 64K and 128K, four attentions, each tuned at 32K from its 2K model.
# authors: tuned on the 32k set of RMT-team/babilong (QA1 to QA10), with which the test at 32K probably overlaps.
# paper: tuned on babilong-train-5k-samples, which shares no sample with the test: the clean split.
. "$(dirname "$0")/settings.sh"
ARMS=$(arms softmax diff path lucid_path)
tokens
prompts babilong babilong --babilong-hub $BABILONG_TRAINING --tasks $STORIES --lengths 32768 --samples $STORY_PROMPTS
for arm in $ARMS; do
  pretrain $arm
  tune_on babilong $arm
  evaluate babilong-$arm --tasks babilong --babilong-hub $BABILONG --lengths 32768,65536,131072 --samples $FEW
done
report figure6 $(for arm in $ARMS; do scores babilong-$arm; done)
