/* The library for programs in C, and for languages that call C: attention on CPUs over a paged
 * engine's own K/V memory, by plans from its page tables or from the steps of a tree (tree.h, which
 * says how calls fail and who owns what). Experimental: it may change between versions of the
 * library, and CHUNKATTN_C_VERSION with it.
 *
 * A program or shared library has the functions from one C++ source file, see chunkattn.ipp. An
 * object is used by one thread at a time: a call while another one uses the same attention fails.
 */
#ifndef CHUNKATTN_C_CHUNKATTN_H
#define CHUNKATTN_C_CHUNKATTN_H

#include "tree.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Types of elements; the last two, of 8 bits, of K and V alone. */
enum {
  CHUNKATTN_FLOAT32 = 0,
  CHUNKATTN_FLOAT16 = 1,
  CHUNKATTN_BFLOAT16 = 2,
  CHUNKATTN_INT8 = 3,
  CHUNKATTN_FLOAT8_E4M3 = 4
};

/** What a scale of K or V of 8 bits is of: element i is scale * stored_i. */
enum {
  CHUNKATTN_SCALES_PER_ROW = 0,  /**< a token and head: what chunkattn_write() stores */
  CHUNKATTN_SCALES_PER_HEAD = 1, /**< a KV head: [num_kv_heads] */
  CHUNKATTN_SCALES_PER_LAYER = 2 /**< all of the layer's K, or V: one */
};

/** How accurate products are at least, see CpuOptions::Accuracy. One term rounds probabilities, and
 *  queries of other types, to bfloat16 where the processor multiplies these faster. */
enum { CHUNKATTN_TWO_TERMS = 0, CHUNKATTN_ONE_TERM = 1 };

/** Attention for heads of one size and K/V of one type, on some threads. It serves all layers. */
typedef struct chunkattn_attention chunkattn_attention;

/** What attention is to be like. Fill it with zeros first. */
typedef struct chunkattn_config {
  int32_t version;      /**< CHUNKATTN_C_VERSION */
  int32_t head_dim;     /**< elements per head of q and K */
  int32_t value_dim;    /**< elements per head of V and out; 0: head_dim */
  int32_t num_qo_heads; /**< heads of q and out, a multiple of num_kv_heads */
  int32_t num_kv_heads; /**< heads of K and V */
  int32_t kv_type;      /**< of the pages: CHUNKATTN_FLOAT32, … */
  int32_t qo_type;      /**< of q, k, v and out */
  int32_t num_threads;  /**< the caller's included, up to 8192; 0: as many as CPUs to use */
  float scale;          /**< factor of q·k, positive; 0: 1 / sqrt(head_dim) */
  int32_t accuracy;     /**< CHUNKATTN_TWO_TERMS or CHUNKATTN_ONE_TERM */
} chunkattn_config;

/** What some models do to logits: soft_cap or sinks, with or without a window, or alibi_slopes.
 *  Zeros: nothing. */
typedef struct chunkattn_variant {
  int32_t window;            /**< keys that a row sees, its own included; 0: all */
  float soft_cap;            /**< positive: logits are cap * tanh(logit / cap); 0: none */
  const float* sinks;        /**< [num_qo_heads] a logit in the softmax without a value; or NULL */
  const float* alibi_slopes; /**< [num_qo_heads] positive, finite; or NULL */
} chunkattn_variant;

/** The pages of a batch, in vLLM's names. */
typedef struct chunkattn_tables {
  const int32_t* block_table; /**< [num_sequences][stride] page ids in path order */
  int64_t stride;             /**< from a sequence's first entry to the next sequence's */
  const int32_t* seq_lens;    /**< [num_sequences] tokens of K/V, queries' included */
  /** [num_sequences + 1] sequence i has the query tokens [query_start_loc[i], query_start_loc[i +
   *  1]), the last ones of its seq_lens[i] */
  const int32_t* query_start_loc;
  int32_t num_sequences;
} chunkattn_tables;

/** The K/V memory of one layer. Strides count elements; those of a row are neighbours. */
typedef struct chunkattn_layer {
  void* k; /**< row of page 0, KV head 0, token 0 */
  void* v; /**< likewise */
  int32_t num_pages;
  int32_t page_size;    /**< tokens per page */
  int64_t k_strides[3]; /**< from a page to the next, from a KV head, from a token */
  int64_t v_strides[3]; /**< likewise */
  /** Of K and V of 8 bits; of other types the rest is not read. Scales of a page's and head's rows
   *  are neighbours. */
  float* k_scale;
  float* v_scale;
  int32_t scales;           /**< CHUNKATTN_SCALES_PER_ROW, … */
  int64_t scale_strides[2]; /**< per row: from a page to the next, from a KV head; else 0 */
} chunkattn_layer;

/** Rows of q, k, v or out at distances of their own, [num_tokens][heads][elements]: a part of a
 *  projection's fused output, say. The elements of a row are neighbours, and no two rows overlap.
 */
typedef struct chunkattn_rows {
  void* data;           /**< of token 0 and head 0; written if it is `out` */
  int64_t stride_token; /**< elements from a token to the next; 0: as without gaps */
  int64_t stride_head;  /**< elements from a head to the next; 0: as without gaps */
} chunkattn_rows;

/** What a plan saves; freed pages do not count. */
typedef struct chunkattn_sharing {
  int32_t num_tokens;   /**< query tokens of the batch */
  int32_t num_segments; /**< parts of sequences that the same rows read */
  int64_t pages_read;   /**< pages that are read, shared ones once */
  int64_t pages_alone;  /**< pages that would be read by each sequence for itself */
} chunkattn_sharing;

/** Attention as `config` says. Fails for sizes and types that no kernels were compiled for (the
 * text lists those that were), on processors that lack their instructions, and where the system
 * does not start so many threads. If the process has OpenMP's, attention uses these. OpenMP keeps
 * threads for each thread that calls it: where another one than the creator's computes, they are
 * started there, by its first call, which fails if the system does not start them. */
CHUNKATTN_C_API chunkattn_attention* chunkattn_attention_create(const chunkattn_config* config);
CHUNKATTN_C_API void chunkattn_attention_destroy(chunkattn_attention* attention);

/** The instruction set, sizes, types and threads, in one line for logs; valid as long as
 *  `attention`. */
CHUNKATTN_C_API const char* chunkattn_describe(const chunkattn_attention* attention);

/** A plan for page tables: for pages of `page_size` tokens with ids from 0 to num_pages - 1.
 *
 *  @param null_page  the id that stands for pages that were freed, as behind a window, and which
 *                    nothing is written to; or -1: there is none */
CHUNKATTN_C_API chunkattn_plan* chunkattn_plan_create(int32_t page_size, int32_t num_pages,
                                                      int32_t null_page);

/** Makes the plan of a batch, in place of the last one: once for all layers. Equal page ids say
 *  equal K/V. If only lengths grew and pages were added, it is updated, else built anew. It does
 * not refer to the arrays afterwards. */
CHUNKATTN_C_API int chunkattn_plan_build(chunkattn_plan* plan, const chunkattn_tables* tables);

/** What the plan's batch shares. */
CHUNKATTN_C_API int chunkattn_plan_sharing(const chunkattn_plan* plan, chunkattn_sharing* sharing);

/** Stores K and V of the plan's query tokens at their positions in the page tables. Of 8 bits each
 *  row gets a scale of its own, so others than CHUNKATTN_SCALES_PER_ROW are refused.
 *
 *  @param k, v  [num_tokens][num_kv_heads][head_dim] (v: value_dim) of qo_type
 *  @param k_stride, v_stride  elements from a token to the next; 0: there are no gaps
 *  @param num_tokens  the plan's, or more, of which the first are used */
CHUNKATTN_C_API int chunkattn_write(chunkattn_attention* attention, const chunkattn_plan* plan,
                                    const chunkattn_layer* layer, const void* k, int64_t k_stride,
                                    const void* v, int64_t v_stride, int32_t num_tokens);

/** chunkattn_write() of rows whose heads have distances of their own, too. */
CHUNKATTN_C_API int chunkattn_write_rows(chunkattn_attention* attention, const chunkattn_plan* plan,
                                         const chunkattn_layer* layer, const chunkattn_rows* k,
                                         const chunkattn_rows* v, int32_t num_tokens);

/** Stores K and V of `num_tokens` tokens where `slots` says, without a plan.
 *
 *  @param slots  [num_tokens] page * page_size + offset; negative: nowhere */
CHUNKATTN_C_API int chunkattn_write_slots(chunkattn_attention* attention,
                                          const chunkattn_layer* layer, const int64_t* slots,
                                          const void* k, int64_t k_stride, const void* v,
                                          int64_t v_stride, int32_t num_tokens);

/** Causal attention of the plan's query tokens over their whole contexts.
 *
 *  @param variant   or NULL
 *  @param q         [num_tokens][num_qo_heads][head_dim] of qo_type
 *  @param q_stride  elements from a token to the next; 0: there are no gaps
 *  @param num_tokens  the plan's, or more, of which the first are computed
 *  @param out       [num_tokens][num_qo_heads][value_dim] of qo_type, without gaps. It may be q, if
 *                   that has as many bytes
 *  @param lse       [num_tokens][num_qo_heads] gets the logarithm of the softmax denominators; or
 *                   NULL. Neither it nor `out` overlaps anything else: q, pages of the layer, what
 *                   the variant points to */
CHUNKATTN_C_API int chunkattn_run(chunkattn_attention* attention, const chunkattn_plan* plan,
                                  const chunkattn_layer* layer, const chunkattn_variant* variant,
                                  const void* q, int64_t q_stride, int32_t num_tokens, void* out,
                                  float* lse);

/** chunkattn_run() of rows whose heads, and those of `out`, have distances of their own, too. What
 *  lies between the rows of `out` is left alone. */
CHUNKATTN_C_API int chunkattn_run_rows(chunkattn_attention* attention, const chunkattn_plan* plan,
                                       const chunkattn_layer* layer,
                                       const chunkattn_variant* variant, const chunkattn_rows* q,
                                       int32_t num_tokens, const chunkattn_rows* out, float* lse);

#ifdef __cplusplus
}
#endif

#endif
