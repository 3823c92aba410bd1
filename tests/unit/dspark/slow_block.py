"""The block drafter written out from its description, one block, one head and one position at a time."""

from __future__ import annotations

import math

import torch


def rms(x, weight, eps=1e-6):
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotate(x, position, theta):
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position / theta ** (2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


class SlowDrafter:
    """`weights` by published name, float64; `config` in the DeepSpec layout."""

    def __init__(self, config, weights, ends):
        self.config = config
        self.w = {name: value.double() for name, value in weights.items()}
        self.ends = ends
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.size = config["head_dim"]

    def key_value(self, layer, x, position):
        """Per head: normed and rotated key, plain value."""
        w = self.w
        k = (w[f"layers.{layer}.self_attn.k_proj.weight"] @ x).view(self.kv_heads, self.size)
        v = (w[f"layers.{layer}.self_attn.v_proj.weight"] @ x).view(self.kv_heads, self.size)
        norm = w[f"layers.{layer}.self_attn.k_norm.weight"]
        return [rotate(rms(head, norm), position, self.config["rope_theta"]) for head in k], list(v)

    def hidden(self, features, anchor, position):
        """features [context, captured, D] at positions 0 .. context - 1; hidden states of the block."""
        w, config = self.w, self.config
        context = [rms(w["fc.weight"] @ f.double().flatten(), w["hidden_norm.weight"]) for f in features]
        ids = [anchor] + [config["mask_token_id"]] * (config["block_size"] - 1)
        xs = [self.ends.embed(torch.tensor([i]))[0].double() for i in ids]
        for layer in range(config["num_hidden_layers"]):
            name = f"layers.{layer}"
            normed = [rms(x, w[f"{name}.input_layernorm.weight"]) for x in xs]
            keys, values = [], []
            for place, c in enumerate(context):
                if place < position:
                    k, v = self.key_value(layer, c, place)
                    keys.append(k)
                    values.append(v)
            for slot, x in enumerate(normed):
                k, v = self.key_value(layer, x, position + slot)
                keys.append(k)
                values.append(v)
            after = []
            for slot, x in enumerate(normed):
                q = (w[f"{name}.self_attn.q_proj.weight"] @ x).view(self.heads, self.size)
                out = []
                for head in range(self.heads):
                    query = rms(q[head], w[f"{name}.self_attn.q_norm.weight"])
                    query = rotate(query, position + slot, config["rope_theta"])
                    kv = head // (self.heads // self.kv_heads)
                    scores = torch.stack([query @ k[kv] for k in keys]) / math.sqrt(self.size)
                    out.append(sum(p * v[kv] for p, v in zip(torch.softmax(scores, 0), values, strict=True)))
                y = xs[slot] + w[f"{name}.self_attn.o_proj.weight"] @ torch.cat(out)
                z = rms(y, w[f"{name}.post_attention_layernorm.weight"])
                gate = w[f"{name}.mlp.gate_proj.weight"] @ z
                up = w[f"{name}.mlp.up_proj.weight"] @ z
                after.append(y + w[f"{name}.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
            xs = after
        return [rms(x, w["norm.weight"]) for x in xs]

    def draw(self, features, anchor, position):
        """Greedy drafts, their logits and confidence logits."""
        w, kind = self.w, self.config.get("markov_head_type")
        rank = self.config["markov_rank"]
        previous, state, ids, rows, confidences = anchor, torch.zeros(rank, dtype=torch.float64), [], [], []
        for h in self.hidden(features, anchor, position):
            logits = self.ends.head(h[None].float())[0].double()
            e = w["markov_head.markov_w1.weight"][previous] if rank else torch.zeros(0)
            if kind == "gated":
                gate = w["markov_head.gate_proj.weight"] @ torch.cat((h, e)) + w["markov_head.gate_proj.bias"]
                code = torch.sigmoid(gate) * e
            elif kind == "rnn":
                joint = w["markov_head.joint_proj.weight"] @ torch.cat((state, e, h)) + w["markov_head.joint_proj.bias"]
                g = torch.sigmoid(joint[:rank])
                state = g * state + (1 - g) * torch.tanh(joint[rank : 2 * rank])
                code = torch.tanh(joint[2 * rank :])
            else:
                code = e
            if rank:
                logits = logits + w["markov_head.markov_w2.weight"] @ code
            seen = torch.cat((h, e)) if self.config.get("confidence_head_with_markov") else h
            confidences.append(w["confidence_head.proj.weight"][0] @ seen + w["confidence_head.proj.bias"][0])
            previous = int(logits.argmax())
            ids.append(previous)
            rows.append(logits)
        return ids, torch.stack(rows), torch.stack(confidences)
