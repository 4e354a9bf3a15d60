"""The engine on a CUDA device: Triton kernels, and decode steps for CUDA graphs.

The CPU path imports none of it.

Kernels, by module. All write into given tensors or return new ones, none waits for the device, and each can be captured
in a CUDA graph, because its grid depends only on shapes.

    norms.rms_norm(x_TE, weight_E, eps) -> out_TE
    norms.add_rms_norm(x_TE, delta_TE, weight_E, eps) -> out_TE         x_TE += delta_TE
    gated.silu_mul(gate_up) -> out_TF                                   also gelu_mul
    products.multiply(x_TK, weight_NK, bias_N, scratch, ..) -> x, y     few rows; with the norm and the gate
    fp8.quantise(x_TE) -> values_TE, scale_T1                           also rms_norm, add_rms_norm, silu_mul, gelu_mul
    place.place(pool, layer, qkv_TND, slot_T, position_T, table_PD, ..) -> q_THD
                                                                        rope, qk-norm, KV into the pool
    work.split(start_B, length_B, ..) -> work                           equal shares of all rows' positions
    attention.attend(pool, layer, q_THD, rows, scratch, ..) -> out_TN   in these shares, over the paged pool; drafts too
    flatten.flatten(pool, layer, table_BP, first_B1, ..) -> k_SKD, v_SKD
                                                                        contiguous, for prefill
    sampling.Sampler(..).draw(logits_BV, draws) -> token_B, logprob_B   Gumbel noise, top_k, top_p, min_p
    extents.gather(raw, block_B, extent, stamp_B2, staging, header)     pool blocks to one staging buffer
    extents.scatter(.. as gather ..) -> status_B                        and back, stamps and checksums compared

Modules that decide and import no torch: splits, extent.

Without a CUDA device every kernel runs in Triton's interpreter (TRITON_INTERPRET=1 before triton is imported), and
compiles for sm_90: tests/unit/engine/gpu does both.
"""
