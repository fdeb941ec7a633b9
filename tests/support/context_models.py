"""Models whose sequences context-parallel ranks share, and what compares a rank with one process."""

import copy

import torch
import transformers
from tensor_ranks import run_ranks

from smpc.context_parallel import shard

BATCH, SEQUENCE, HIDDEN, VOCABULARY = 2, 16, 32, 64
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}


def tokens(length=SEQUENCE, **more):
    """Token ids and labels; samples have unequally many labels that count, on both sides of every border between slices."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(3, VOCABULARY, (2, BATCH, length), generator=generator)
    labels[0, : length // 2 + 1] = -100
    labels[1, -3:] = -100
    return {"input_ids": ids, "labels": labels, **more}


def padded(length=SEQUENCE, **more):
    """The same with padding at the end of one sample."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[1, -3:] = 0
    return tokens(length, attention_mask=mask, **more)


def gpt2(length=SEQUENCE):
    config = transformers.GPT2Config(
        n_layer=2, n_embd=HIDDEN, n_head=4, vocab_size=VOCABULARY, n_positions=32, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), tokens(length, use_cache=False)


def llama(length=SEQUENCE):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)), tokens(length, use_cache=False)


def llama_padded(length=SEQUENCE):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)), padded(length, use_cache=False)


def llama_eager(length=SEQUENCE):
    config = transformers.LlamaConfig(**GROUPED, attn_implementation="eager")
    return transformers.LlamaForCausalLM(config), tokens(length, use_cache=False)


def neox(length=SEQUENCE):
    config = transformers.GPTNeoXConfig(**SIZES, hidden_dropout=0, attention_dropout=0)
    return transformers.GPTNeoXForCausalLM(config), tokens(length, use_cache=False)


def qwen3(length=SEQUENCE):
    config = transformers.Qwen3Config(**GROUPED, head_dim=8)
    return transformers.Qwen3ForCausalLM(config), tokens(length, use_cache=False)


def bert(length=SEQUENCE):
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    return transformers.BertForMaskedLM(config), padded(length)


def t5(length=SEQUENCE):
    config = transformers.T5Config(
        num_layers=2, d_model=HIDDEN, num_heads=4, d_kv=8, d_ff=64, vocab_size=VOCABULARY, dropout_rate=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), padded(length, use_cache=False)


MODELS = {make.__name__: make for make in (gpt2, llama, llama_padded, llama_eager, neox, qwen3, bert, t5)}


def made(make, dtype=torch.float32, **given):
    """The model in training mode, with parameters that differ from what they are initialised to, and a batch."""
    torch.manual_seed(0)
    model, inputs = make(**given)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    if dtype is torch.float64 and hasattr(model, "loss_function"):
        model.loss_function = _wide_loss
    return model.to(dtype).train(), inputs


def _wide_loss(logits, labels, **_):
    """The loss of causal models in the type of the logits: theirs is in float32."""
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def trained(module, inputs):
    """The loss, and the gradient of every parameter that has one."""
    output = module(**inputs)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    owner = getattr(module, "model", module) if hasattr(module, "rewritten") else module
    gradients = {name: p.grad.clone() for name, p in owner.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def on_ranks(groups, make, dtype=torch.float32, **options):
    """By rank of this process: its module and what it trains on its share of the sequence; and what one process trains on the whole."""
    model, inputs = made(make, dtype)
    modules = [shard(copy.deepcopy(model), inputs, group, **options) for group in groups]
    found = run_ranks(len(modules), lambda place: trained(modules[place], inputs))
    return list(zip(modules, found, strict=True)), trained(model, inputs)


def assert_alike(found, expected, dtype=torch.float32):
    """Loss and gradients, relative to each tensor's largest entry; what is zero but for rounding, relative to the largest of all."""
    loss_error, gradient_error = (1e-6, 1e-5) if dtype is torch.float32 else (1e-10, 1e-10)
    (loss, gradients), (whole_loss, whole) = found, expected
    assert abs(loss - whole_loss) <= loss_error * abs(whole_loss), (loss, whole_loss)
    assert list(gradients) == list(whole)
    largest = max(gradient.abs().max() for gradient in whole.values())
    for name, gradient in whole.items():
        error = (gradients[name] - gradient).abs().max()
        assert error <= gradient_error * max(gradient.abs().max(), 0.01 * largest), (name, error)
