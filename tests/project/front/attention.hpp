// The interface between the units of a program.
#pragma once

#include <chunkattn/runtime/any_attention.hpp>
#include <memory>
#include <span>

/// A layer of a model. All rows at once, [num_rows][heads][head_dim].
void attend(chunkattn::AnyAttention& attention, const chunkattn::AnyKvView& layer,
            const chunkattn::LiveView& plan, const chunkattn::AnyVariant& variant,
            std::span<const float> q, std::span<const float> k, std::span<const float> v,
            std::span<float> out);

std::unique_ptr<chunkattn::AnyAttention> cpu_attention(int head_dim);
#if defined(WITH_CUDA)
std::unique_ptr<chunkattn::AnyAttention> cuda_attention(int head_dim, int max_rows,
                                                        int num_qo_heads, int num_kv_heads);
#endif
