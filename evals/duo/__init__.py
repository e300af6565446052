"""Finding DuoAttention's retrieval heads (arXiv:2410.10819): which KV heads need the whole context.

data        synthetic contexts with hidden passkeys, and questions about them
gates       attention that mixes full and streaming, by a gate per KV head
train       distillation of the ungated model under an L1 penalty: heads that matter keep their gates open
checkpoint  what a training goes on from that was interrupted
compare     what the found heads are worth: retrieval with the best, random and worst heads kept whole
"""
