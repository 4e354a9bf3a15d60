"""Triton kernels and what launches them; they know tensors, not rows.

All write into given tensors or return new ones, none waits for the device, and each can be captured in a CUDA graph,
because its grid depends only on shapes. Without a CUDA device they run in Triton's interpreter, and compile for sm_90:
tests/unit/engine/gpu does both. They import memory, cpu, sampling and model of the engine. Read `norms.py` first,
then `attention.py`.

    norms.rms_norm(x_TE, weight_E, eps) -> out_TE
    norms.add_rms_norm(x_TE, delta_TE, weight_E, eps) -> out_TE         x_TE += delta_TE
    norms.silu_mul(gate_up) -> out_TF                                   also gelu_mul
    products.multiply(x_TK, weight_NK, bias_N, scratch, ..) -> x, y     few rows; with the norm and the gate
    fp8.quantise(x_TE) -> values_TE, scale_T1                           also rms_norm, add_rms_norm, silu_mul, gelu_mul
    kv.place(pool, layer, qkv_TND, slot_T, position_T, table_PD, ..) -> q_THD
                                                                        rope, qk-norm, KV into the pool
    kv.flatten(pool, layer, table_BP, first_B1, ..) -> k_SKD, v_SKD     contiguous, for prefill
    attention_plan.split(start_B, length_B, ..) -> work                 equal shares of all rows' positions
    attention.attend(pool, layer, q_THD, rows, scratch, ..) -> out_TN   in these shares, over the paged pool; drafts too
    sampling.Sampler(..).draw(logits_BV, draws) -> token_B, logprob_B   Gumbel noise, top_k, top_p, min_p
    kv.relay(..)                                                        whole blocks to another pool, with checksums

Modules that decide and import no torch: fixed_shapes, extent, switches.
"""
