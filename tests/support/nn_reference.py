"""What each tensor-parallel module computes, written plainly from the public reference, for one process. Names of parameters are ours."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, heads, head_size, hidden, pre, post, causal=False, cross=False, eps=1e-5):
        super().__init__()
        self.heads, self.causal, self.cross = heads, causal, cross
        self.pre_layernorm = nn.LayerNorm(hidden, eps) if pre else None
        self.query = nn.Linear(hidden, heads * head_size)
        self.key = nn.Linear(hidden, heads * head_size)
        self.value = nn.Linear(hidden, heads * head_size)
        self.dense = nn.Linear(heads * head_size, hidden)
        self.layernorm = nn.LayerNorm(hidden, eps) if post else None

    def forward(self, inputs):
        x, mask = inputs[0], inputs[-1]
        h = self.pre_layernorm(x) if self.pre_layernorm else x
        source = inputs[1] if self.cross else h
        n, s, _ = h.shape
        q, k, v = (
            f(y).view(n, y.shape[1], self.heads, -1).permute(0, 2, 1, 3)
            for f, y in ((self.query, h), (self.key, source), (self.value, source))
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(mask.bool(), -1e30)
        if self.causal:
            scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), -1e30)
        h = (scores.softmax(-1) @ v).permute(0, 2, 1, 3).reshape(n, s, -1)
        out = x + self.dense(h)
        return self.layernorm(out) if self.layernorm else out


class Output(nn.Module):
    def __init__(self, hidden, intermediate, activation, pre, post, eps=1e-5):
        super().__init__()
        self.activation = {"gelu": F.gelu, "relu": F.relu}[activation]
        self.pre_layernorm = nn.LayerNorm(hidden, eps) if pre else None
        self.dense1, self.dense2 = nn.Linear(hidden, intermediate), nn.Linear(intermediate, hidden)
        self.layernorm = nn.LayerNorm(hidden, eps) if post else None

    def forward(self, x):
        h = self.pre_layernorm(x) if self.pre_layernorm else x
        out = x + self.dense2(self.activation(self.dense1(h)))
        return self.layernorm(out) if self.layernorm else out


class Layer(nn.Module):
    def __init__(self, heads, head_size, hidden, intermediate, activation, pre, post, causal, cross):
        super().__init__()
        self.attention = Attention(heads, head_size, hidden, pre, post, causal)
        self.cross_attention = Attention(heads, head_size, hidden, pre, post, cross=True) if cross else None
        self.output = Output(hidden, intermediate, activation, pre, post)

    def forward(self, states):
        if self.cross_attention is None:
            return (self.output(self.attention(states)), states[1])
        x, cross, mask, cross_mask = states
        return (self.output(self.cross_attention((self.attention((x, mask)), cross, cross_mask))), *states[1:])


class Transformer(nn.Module):
    def __init__(self, num_layers, *args):
        super().__init__()
        hidden, pre, post = args[2], args[5], args[6]
        self.input_layernorm = nn.LayerNorm(hidden) if pre and post else None
        self.seq_layers = nn.ModuleList(Layer(*args) for _ in range(num_layers))
        self.output_layernorm = nn.LayerNorm(hidden) if pre and post else None

    def forward(self, states):
        if self.input_layernorm:
            states = (self.input_layernorm(states[0]), *states[1:])
        for layer in self.seq_layers:
            states = layer(states)
        return (self.output_layernorm(states[0]), *states[1:]) if self.output_layernorm else states


class Embeddings(nn.Module):
    def __init__(self, vocabulary, positions, types, hidden):
        super().__init__()
        self.word_embedding = nn.Embedding(vocabulary, hidden)
        self.position_embedding = nn.Embedding(positions, hidden)
        self.token_type_embedding = nn.Embedding(types, hidden) if types else None

    def forward(self, ids, types, positions):
        if positions is None:
            positions = torch.arange(ids.shape[1]).expand_as(ids)
        x = self.word_embedding(ids) + self.position_embedding(positions)
        return x + self.token_type_embedding(types) if types is not None else x


class LMHead(nn.Module):
    def __init__(self, vocabulary, positions, types, head, num_layers, *args):
        super().__init__()
        self.embeddings = Embeddings(vocabulary, positions, types, args[2])
        self.transformer = Transformer(num_layers, *args)
        self.head, self.causal, self.cross = head, args[7], args[8]

    def forward(self, inputs):
        ids, mask, types, positions, *cross, labels = inputs
        mask = None if mask is None else mask[:, None, None, :].bool()
        states = (self.embeddings(ids, types, positions), mask)
        if self.cross:
            cross_mask = None if cross[1] is None else cross[1][:, None, None, :].bool()
            states = (states[0], cross[0], mask, cross_mask)
        hidden = self.transformer(states)[0]
        if not self.head:
            return hidden
        logits = F.linear(hidden, self.embeddings.word_embedding.weight)
        if labels is None:
            return logits
        if self.causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
