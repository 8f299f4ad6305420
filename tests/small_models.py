"""Small transformers of many families and their dropout sites by kind, for tests of sites, schedules and noise."""

import random

import pytest
import torch
import transformers

from isoreg.sites import dropout_sites

BERT = dict(
    vocab_size=99,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=32,
)
SMALL = {  # name: (config class, model class, settings, attention implementations, Counter of kinds)
    "bert": (
        "Bert",
        "ForSequenceClassification",
        BERT,
        2,
        dict(embedding=1, attention_probs=2, attention_output=2, ffn_output=2, classifier=1),
    ),
    "roberta": (
        "Roberta",
        "ForSequenceClassification",
        BERT,
        2,
        dict(embedding=1, attention_probs=2, attention_output=2, ffn_output=2, classifier=1),
    ),
    "albert": (
        "Albert",
        "ForSequenceClassification",
        BERT | dict(embedding_size=8, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1),
        2,
        dict(embedding=1, attention_probs=1, attention_output=1, classifier=1),
    ),
    "electra": (
        "Electra",
        "ForSequenceClassification",
        BERT | dict(embedding_size=8),
        2,
        dict(embedding=1, attention_probs=2, attention_output=2, ffn_output=2, classifier=1),
    ),
    "distilbert": (
        "DistilBert",
        "ForSequenceClassification",
        dict(vocab_size=99, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=32),
        2,
        dict(embedding=1, attention_probs=2, ffn_output=2, classifier=1),
    ),
    "gpt2": (
        "GPT2",
        "LMHeadModel",
        dict(vocab_size=99, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2),
        2,
        dict(embedding=1, attention_probs=2, attention_output=2, ffn_output=2),
    ),
    "t5": (
        "T5",
        "ForConditionalGeneration",
        dict(vocab_size=99, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0),
        2,
        dict(embedding=2, attention_probs=3, attention_output=3, ffn_inner=2, ffn_output=2),
    ),
    "modernbert": (
        "ModernBert",
        "ForSequenceClassification",
        BERT
        | dict(
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
            attention_dropout=0.1,
            mlp_dropout=0.1,
            embedding_dropout=0.1,
        ),
        2,
        dict(embedding=1, attention_probs=2, attention_output=2, ffn_inner=2, classifier=1),
    ),
    "mpnet": (
        "MPNet",
        "ForSequenceClassification",
        BERT,
        1,
        dict(embedding=1, attention_probs=2, attention_output=2, ffn_output=2, classifier=1),
    ),
    "deberta": (
        "DebertaV2",
        "ForSequenceClassification",
        BERT | dict(relative_attention=True, pos_att_type=["p2c", "c2p"]),
        1,
        dict(embedding=1, other=2, attention_probs=2, attention_output=2, ffn_output=2, classifier=2),
    ),
    "llama": (
        "Llama",
        "ForCausalLM",
        BERT | dict(num_key_value_heads=1, attention_dropout=0.1),
        2,
        dict(attention_probs=2),
    ),
    "qwen2": (
        "Qwen2",
        "ForCausalLM",
        BERT | dict(num_key_value_heads=1, attention_dropout=0.1),
        2,
        dict(attention_probs=2),
    ),
    "opt": (
        "OPT",
        "ForCausalLM",
        dict(
            vocab_size=99,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            word_embed_proj_dim=16,
            max_position_embeddings=32,
            attention_dropout=0.1,
        ),
        2,
        dict(attention_probs=2, residual=2),
    ),
}


def make(name="bert", attention="eager", head=None, **settings):
    family, default, config, _, _ = SMALL[name]
    torch.manual_seed(0)
    extra = {} if SMALL[name][3] == 1 else {"attn_implementation": attention}
    try:
        return getattr(transformers, family + (default if head is None else head))(
            getattr(transformers, family + "Config")(**config | settings, **extra)
        )
    except ValueError as error:
        if "does not support an attention implementation" in str(error):
            pytest.skip(f"{name} has no SDPA in transformers {transformers.__version__}")
        raise


IDS = torch.arange(5, 17)[None]


@torch.no_grad()
def output(model, ids=IDS):
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, **extra)[0]


def rates(model, **options):
    return {s.name: s.p for s in dropout_sites(model, **options)}


def scores_of(model, seed=0):
    draw = random.Random(seed)
    return {n: draw.random() for n, _ in model.named_parameters()}


EVERY = [(name, attention) for name in SMALL for attention in ("eager", "sdpa")[: SMALL[name][3]]]
