# Model, data, optimiser and lengths of the paper's runs, and the steps that all scripts of this folder share.
#
#   PROTOCOL=authors   what the authors' code does (default); paper: the text, where it differs
#   SCALE=full         the paper's size (default); tiny: minutes on two cores, with stand-ins for the data, offline
#   GPUS=8 NODES=1     GPUs of a node, and nodes. On several nodes run the script on each, with NODE_RANK=0, 1, ...
#                      and HEAD=host:port of the first; OUT and DATA are on storage that all nodes share
#   GPU_MEMORY=80      GB of a GPU, which DRY=1 checks
#   DRY=1              print the commands, what they cost, and whether they fit; run nothing
#   ATTENTIONS="..."   only these arms
#
# Every step resumes: the same script goes on where it was stopped. Model and optimiser are the recipes
# (`lucid train pretrain_2k --show`); what a script changes stands in the script.
set -eu
PAPER=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python} PROTOCOL=${PROTOCOL:-authors} SCALE=${SCALE:-full} GPUS=${GPUS:-8} NODES=${NODES:-1}
NODE_RANK=${NODE_RANK:-0} DRY=${DRY:-} OUT=${OUT:-runs/paper} DATA=${DATA:-data} PARALLEL=${PARALLEL:-ddp}
export PROTOCOL SCALE GPUS NODES
if [ "$DRY" = 1 ]; then exec "$PYTHON" "$PAPER/costs.py" "$0"; fi

case $PROTOCOL in
  authors) TUNING_RATE=5e-6 SPLIT="--share 0.7 --validation 0.1" MNIAH=multikey_1 PART=all PLAIN=--plain
           BABILONG_TRAINING=RMT-team/babilong STORIES=qa1,qa2,qa3,qa4,qa5,qa6,qa7,qa8,qa9,qa10 STORY_PROMPTS=100 ;;
  paper)   TUNING_RATE=5e-4 SPLIT="--limit-tokens 6500000000 --seed 0" PART=held_out PLAIN=
           MNIAH=multikey_1,multikey_2,multikey_3,multivalue,multiquery
           BABILONG_TRAINING=RMT-team/babilong-train-5k-samples STORIES=qa1,qa2,qa3,qa4,qa5 STORY_PROMPTS=200 ;;
  *) echo "PROTOCOL must be authors or paper, got $PROTOCOL" >&2; exit 2 ;;
esac
case $SCALE in
  full) L2=2048 L4=4096 L6=6144 L8=8192 L16=16384 L32=32768 L64=65536 L128=131072 TINY= ANSWERS= SAMPLES=500 FEW=50
        # TinyLlama's tokenizer is Llama's, as the authors'. Without the hub: TOKENIZER=train:32000
        DOLMA=@https://huggingface.co/datasets/allenai/dolma/resolve/main/urls/v1_6-sample.txt
        LARGE_DOLMA=@https://huggingface.co/datasets/allenai/dolma/resolve/main/urls/v1_7.txt
        TOKENIZER=${TOKENIZER:-TinyLlama/TinyLlama-1.1B-Chat-v1.0} LARGE_TOKENIZER=train:256000 ESSAYS=essays
        BABILONG=RMT-team/babilong-1k-samples LONGQA= CUT=32768 ;;
  tiny) L2=768 L4=832 L6=896 L8=960 L16=1024 L32=1088 L64=1152 L128=1216 SAMPLES=2 FEW=2 GPUS=1 NODES=1
        # The last changes win: they make every training a few seconds long.
        TINY="--set steps=2 --set batch_size=2 --set micro_batch_size=1 --set evaluation_sequences=2 --set workers=0
              --set precision=float32 --set log_every=1 --set save_every=1 --set evaluate_every=1"
        STAND_INS=$DATA/stand_ins DATA=$DATA/tiny DOLMA=@$STAND_INS/dolma/files.txt LARGE_DOLMA=@$STAND_INS/dolma/files.txt
        TOKENIZER=train:2000 LARGE_TOKENIZER=train:2500 ESSAYS=$STAND_INS/essays BABILONG=$STAND_INS/babilong
        BABILONG_TRAINING=$STAND_INS/babilong LONGQA="--data-dir $STAND_INS/longqa" CUT=1024 ANSWERS="--answer-tokens 4"
        STORY_PROMPTS=2 SPLIT="--validation 0.2" ;;
  *) echo "SCALE must be full or tiny, got $SCALE" >&2; exit 2 ;;
esac
# Tokens and prompts of one protocol are not those of the other; the corpus of Figure 7 is.
LARGE=$DATA/dolma-256k DATA=$DATA/$PROTOCOL
RUNS=$OUT/$PROTOCOL-$SCALE MODELS=$OUT/$PROTOCOL-$SCALE/models SCORES=$OUT/$PROTOCOL-$SCALE/scores
UP_TO_8K=$L2,$L4,$L6,$L8 FROM_16K=$L16,$L32,$L64

# ------------------------------------------------------------------------------------------------ how commands run

alone() {  # a lucid command in one process, on the first node
  if [ "$NODE_RANK" = 0 ]; then echo "lucid $*"; [ -n "$DRY" ] || "$PYTHON" -m lucid_lab.cli "$@"; fi
}
everywhere() {  # a lucid command on all GPUs of all nodes
  echo "lucid $*"
  if [ -n "$DRY" ]; then return; fi
  if [ $((GPUS * NODES)) = 1 ]; then "$PYTHON" -m lucid_lab.cli "$@"; return; fi
  # The other nodes wait for as long as the first one prepares data.
  "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --nproc-per-node "$GPUS" --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:-localhost:29500}" --rdzv-conf join_timeout=86400 -m lucid_lab.cli "$@"
}
helper() {  # a Python file of this folder
  if [ "$NODE_RANK" = 0 ] && [ -z "$DRY" ]; then "$PYTHON" "$PAPER/$@"; fi
}
if [ "$SCALE" = tiny ] && [ ! -d "$STAND_INS" ]; then helper stand_ins.py "$STAND_INS"; fi

# ------------------------------------------------------------------------------------------------------- the steps

arms() {  # arms NAME...: the arms of a script; those of ATTENTIONS; at the tiny scale the first and the last
  for last in "$@"; do :; done
  if [ -n "${ATTENTIONS:-}" ]; then echo "$ATTENTIONS"; elif [ "$SCALE" = tiny ]; then echo "$1 $last"; else echo "$*"; fi
}
options() {  # the options of an arm: its attention, and what its model changes
  case $1 in
    path | lucid_path)
      echo "--attention $1"
      # Theirs is fla's PaTH: heads of 64, w of full rank, no short convolution.
      if [ "$PROTOCOL" = authors ]; then
        echo "--set model.head_dim=64 --set attention_options.w_rank=null --set attention_options.conv_size=null"
      fi ;;
    qk_norm) echo "--attention lucid --set attention_options.norm=qk" ;;
    row_max) echo "--attention lucid --set attention_options.norm=row_max" ;;
    learn_beta)
      echo "--attention lucid --set attention_options.learn_beta=true"
      if [ "$PROTOCOL" = authors ]; then echo "--set attention_options.double_beta=true"; fi ;;
    *) echo "--attention $1" ;;
  esac
  if [ "$SCALE" = tiny ]; then
    echo "--set model.num_hidden_layers=${LAYERS:-2} --set model.hidden_size=64 --set model.intermediate_size=96"
    echo "--set model.num_attention_heads=4 --set model.num_key_value_heads=2"
  fi
}
tokens() {  # the corpus of §4.1, as tokens
  alone tokenize "$DOLMA" "$DATA/dolma" --tokenizer "$TOKENIZER" $SPLIT
}
pretrain() {  # pretrain ARM: §4.1, 2048 tokens, into models/2k-ARM
  everywhere train pretrain_2k $(options "$1") --data "$DATA/dolma" --out "$MODELS/2k-$1" --parallel "$PARALLEL" \
    --set sequence_length=$L2 $TINY
}
tune() {  # tune ARM NAME [CHANGE...]: §4.1, 64K with a RoPE base of 64 000, from the 2K model, into models/NAME
  arm=$1 name=$2; shift 2
  everywhere train finetune_64k --from "$MODELS/2k-$arm/model" --data "$DATA/dolma" --out "$MODELS/$name" \
    --parallel "$PARALLEL" --set sequence_length=$L64 --set learning_rate=$TUNING_RATE "$@" $TINY
}
prompts() {  # prompts NAME KIND [WORD...]: prompts with answers for tuning, into DATA/NAME.jsonl
  name=$1 kind=$2; shift 2
  [ -e "$DATA/$name.jsonl" ] || alone make-data "$kind" "$DATA/$name.jsonl" $PLAIN "$@"
}
tune_on() {  # tune_on RECIPE ARM [CHANGE...]: tuning on prompts, from the 2K model, into models/RECIPE-ARM
  recipe=$1 arm=$2; shift 2
  few=; if [ "$SCALE" = tiny ]; then few="--set data_options.validation=0.4 --set sequence_length=$L128"; fi
  everywhere train "$recipe" --from "$MODELS/2k-$arm/model" --data "$DATA/$recipe.jsonl" --out "$MODELS/$recipe-$arm" \
    --parallel "$PARALLEL" "$@" $TINY $few
}
evaluate() {  # evaluate NAME WORD...: the model models/NAME, in bfloat16, into scores/NAME
  name=$1; shift
  everywhere eval "$MODELS/$name/model" --dtype "$([ "$SCALE" = tiny ] && echo float32 || echo bfloat16)" "$@" $ANSWERS \
    --out "$SCORES/$name"
}
mniah() {  # mniah NAME NEEDLES LENGTHS [SAMPLES]: RULER's niah_multikey_1 with k needles
  evaluate "$1" --tasks mniah --variants $MNIAH --needles "$2" --lengths "$3" --samples "${4:-$SAMPLES}" \
    --haystack "$ESSAYS" --batch-size "${5:-30}"
}
sniah() {  # sniah NAME LENGTHS [SAMPLES]: RULER's niah_single_1 to 3; which two of them the paper averages is not known
  evaluate "$1" --tasks sniah --lengths "$2" --samples "${3:-$SAMPLES}" --haystack "$ESSAYS" --batch-size "${4:-30}"
}
report() {  # report TABLE FOLDER...: our numbers next to the paper's, and a page with all runs
  table=$1; shift
  helper compare.py "$table" "$RUNS" "$L2 $L4 $L6 $L8 $L16 $L32 $L64 $L128"
  alone report "$RUNS/compare/$table" "$@" --out "$RUNS/$table.html"
}
scores() { for name in "$@"; do echo "$SCORES/$name"; done; }
