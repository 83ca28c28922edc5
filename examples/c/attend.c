/* The C interface: four sequences behind a common page of a paged engine, and the same by softmax. */
#include <chunkattn/c/chunkattn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { dim = 64, heads = 4, kv_heads = 2, page = 16, pages = 9, sequences = 4 };
static float k[pages][kv_heads][page][dim], v[pages][kv_heads][page][dim]; /* the engine's memory */
static float q[sequences][heads][dim], keys[sequences][kv_heads][dim], out[sequences][heads][dim];

static void must(int failed) {
  if (failed) fprintf(stderr, "%s\n", chunkattn_error()), exit(1);
}

int main(void) {
  const int32_t block_table[sequences][2] = {{0, 1}, {0, 2}, {0, 3}, {0, 4}}; /* page 0 is shared */
  const int32_t seq_lens[] = {20, 17, 32, 25}, query_start_loc[] = {0, 1, 2, 3, 4};
  const chunkattn_tables tables = {&block_table[0][0], 2, seq_lens, query_start_loc, sequences};
  const int64_t strides[3] = {kv_heads * page * dim, page * dim, dim};
  chunkattn_layer layer = {.k = k, .v = v, .num_pages = pages, .page_size = page};
  for (int i = 0; i < 3; ++i) layer.k_strides[i] = layer.v_strides[i] = strides[i];
  for (int i = 0; i < (int)(sizeof k / sizeof(float)); ++i) k[0][0][0][i] = sinf(i), v[0][0][0][i] = cosf(i);
  for (int i = 0; i < (int)(sizeof q / sizeof(float)); ++i) q[0][0][i] = sinf(3 * i);
  for (int i = 0; i < (int)(sizeof keys / sizeof(float)); ++i) keys[0][0][i] = cosf(2 * i);

  const chunkattn_config config = {.version = CHUNKATTN_C_VERSION, .head_dim = dim, .num_qo_heads = heads,
                                   .num_kv_heads = kv_heads, .num_threads = 2};
  chunkattn_attention *attention = chunkattn_attention_create(&config);
  chunkattn_plan *plan = chunkattn_plan_create(page, pages, -1);
  must(attention == NULL || plan == NULL);
  must(chunkattn_plan_build(plan, &tables)); /* once for all layers */
  must(chunkattn_write(attention, plan, &layer, keys, 0, keys, 0, sequences)); /* in each layer */
  must(chunkattn_run(attention, plan, &layer, NULL, q, 0, sequences, out, NULL));
  chunkattn_sharing sharing;
  must(chunkattn_plan_sharing(plan, &sharing));
  printf("%s\n%d pages are read, not %d\n", chunkattn_describe(attention), (int)sharing.pages_read,
         (int)sharing.pages_alone);

  double worst = 0;
  for (int s = 0; s < sequences; ++s)
    for (int h = 0; h < heads; ++h) {
      double sum = 0, mean = 0;
      for (int t = 0; t < seq_lens[s]; ++t) {
        const int at = block_table[s][t / page], head = h / (heads / kv_heads);
        double dot = 0;
        for (int i = 0; i < dim; ++i) dot += (double)q[s][h][i] * k[at][head][t % page][i];
        sum += exp(dot / 8), mean += exp(dot / 8) * v[at][head][t % page][7];
      }
      worst = fmax(worst, fabs(mean / sum - out[s][h][7]));
    }
  chunkattn_plan_destroy(plan);
  chunkattn_attention_destroy(attention);
  printf("off by less than 1e-5: %s\n", worst < 1e-5 ? "yes" : "NO");
  return worst < 1e-5 ? 0 : 1;
}
