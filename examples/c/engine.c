/* An engine in C: prompts of a llama2.c checkpoint, generated greedily and in one batch.
 *
 *     engine CHECKPOINT TOKENIZER LENGTH PROMPT...
 *
 * The tree finds what the prompts share: each shared token is computed, stored and read once. */
#include <chunkattn/c/chunkattn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { chunk_size = 16, max_chunks = 512, max_prompts = 64, head_dim = 8 };

static void must(int failed) {
  if (failed) fprintf(stderr, "%s\n", chunkattn_error()), exit(1);
}
static void *memory(size_t count, size_t size) {
  void *got = calloc(count ? count : 1, size);
  if (!got) fprintf(stderr, "out of memory\n"), exit(1);
  return got;
}
static void *file(const char *path, size_t *size) {
  FILE *f = fopen(path, "rb");
  if (!f || fseek(f, 0, SEEK_END)) fprintf(stderr, "%s: cannot be read\n", path), exit(1);
  *size = (size_t)ftell(f);
  char *data = memory(*size + 1, 1);
  rewind(f);
  if (fread(data, 1, *size, f) != *size) fprintf(stderr, "%s: cannot be read\n", path), exit(1);
  return fclose(f), data;
}

/* ---- the model ---- */

static struct {
  int dim, hidden, layers, heads, kv_heads, vocab, length;
} shape;
static const float *embedding, *rms_attention, *wq, *wk, *wv, *wo, *rms_ffn, *w1, *w2, *w3, *rms_final;

static const float *take(const float **at, int count, int rows, int columns) {
  const float *taken = *at;
  *at += (size_t)count * rows * columns;
  return taken;
}
static void load(const char *path) {
  size_t size;
  const char *data = file(path, &size);
  memcpy(&shape, data, sizeof shape);
  if (size < sizeof shape || shape.vocab <= 0 || shape.dim != shape.heads * head_dim)
    fprintf(stderr, "%s: not a llama2.c checkpoint with heads of %d\n", path, head_dim), exit(1);
  const float *at = (const float *)(data + sizeof shape);
  const int n = shape.layers, dim = shape.dim, kv = shape.kv_heads * head_dim, hidden = shape.hidden;
  embedding = take(&at, 1, shape.vocab, dim), rms_attention = take(&at, n, 1, dim);
  wq = take(&at, n, dim, dim), wk = take(&at, n, kv, dim), wv = take(&at, n, kv, dim), wo = take(&at, n, dim, dim);
  rms_ffn = take(&at, n, 1, dim), w1 = take(&at, n, hidden, dim), w2 = take(&at, n, dim, hidden);
  w3 = take(&at, n, hidden, dim), rms_final = take(&at, 1, 1, dim);
  if ((const char *)at > data + size) fprintf(stderr, "%s: too short\n", path), exit(1);
}

/* out[rows][m] (+)= in[rows][n] w[m][n] */
static void multiply(float *out, const float *in, const float *w, int rows, int n, int m, int adds) {
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < m; ++i) {
      float sum = 0;
      for (int j = 0; j < n; ++j) sum += w[(size_t)i * n + j] * in[r * n + j];
      out[r * m + i] = adds ? out[r * m + i] + sum : sum;
    }
}
static void normalise(float *out, const float *in, const float *weight, int rows, int n) {
  for (int r = 0; r < rows; ++r, in += n, out += n) {
    float squares = 0;
    for (int i = 0; i < n; ++i) squares += in[i] * in[i];
    const float scale = 1 / sqrtf(squares / n + 1e-5f);
    for (int i = 0; i < n; ++i) out[i] = weight[i] * (scale * in[i]);
  }
}
static void rotate(float *rows, int num_rows, int heads, const int32_t *positions) {
  for (int r = 0; r < num_rows; ++r)
    for (int i = 0; i < heads * head_dim; i += 2) {
      const float angle = positions[r] / powf(10000, (float)(i % head_dim) / head_dim);
      float *pair = rows + (size_t)r * heads * head_dim + i, a = pair[0], b = pair[1];
      pair[0] = a * cosf(angle) - b * sinf(angle), pair[1] = a * sinf(angle) + b * cosf(angle);
    }
}

/* ---- a step ---- */

static chunkattn_attention *attention;
static chunkattn_layer *kv; /* the engine's memory: [chunk][head][token][head_dim] of each layer */

static void allocate(void) {
  const chunkattn_config config = {.version = CHUNKATTN_C_VERSION, .head_dim = head_dim,
                                   .num_qo_heads = shape.heads, .num_kv_heads = shape.kv_heads, .num_threads = 2};
  must((attention = chunkattn_attention_create(&config)) == NULL);
  kv = memory(shape.layers, sizeof *kv);
  for (int l = 0; l < shape.layers; ++l) {
    const int64_t head = chunk_size * head_dim, chunk = shape.kv_heads * head;
    kv[l] = (chunkattn_layer){.k = memory(max_chunks, chunk * sizeof(float)),
                              .v = memory(max_chunks, chunk * sizeof(float)),
                              .num_pages = max_chunks, .page_size = chunk_size,
                              .k_strides = {chunk, head, head_dim}, .v_strides = {chunk, head, head_dim}};
  }
}

/* Computes a step's rows; x[rows][dim] gets what the last norm gives. */
static void forward(chunkattn_step *step, const chunkattn_plan *plan, float **x) {
  const int rows = (int)chunkattn_step_num_rows(step), dim = shape.dim, heads = shape.kv_heads;
  int32_t *tokens = memory(rows, sizeof *tokens), *positions = memory(rows, sizeof *positions);
  must(chunkattn_step_tokens(step, 0, tokens, rows));
  must(chunkattn_step_positions(step, positions, rows));
  float *h = *x = memory((size_t)rows * dim, sizeof(float)), *normed = memory((size_t)rows * dim, sizeof(float));
  float *q = memory((size_t)rows * dim, sizeof(float)), *out = memory((size_t)rows * dim, sizeof(float));
  float *k = memory((size_t)rows * dim, sizeof(float)), *v = memory((size_t)rows * dim, sizeof(float));
  const size_t hidden = (size_t)rows * shape.hidden;
  float *gate = memory(hidden, sizeof(float)), *up = memory(hidden, sizeof(float));
  for (int r = 0; r < rows; ++r) memcpy(h + (size_t)r * dim, embedding + (size_t)tokens[r] * dim, dim * sizeof(float));
  for (int l = 0; l < shape.layers; ++l) {
    const size_t square = (size_t)l * dim * dim, narrow = (size_t)l * dim * heads * head_dim;
    normalise(normed, h, rms_attention + l * dim, rows, dim);
    multiply(q, normed, wq + square, rows, dim, dim, 0);
    multiply(k, normed, wk + narrow, rows, dim, heads * head_dim, 0);
    multiply(v, normed, wv + narrow, rows, dim, heads * head_dim, 0);
    rotate(q, rows, shape.heads, positions), rotate(k, rows, heads, positions);
    must(chunkattn_write(attention, plan, &kv[l], k, 0, v, 0, rows));
    must(chunkattn_run(attention, plan, &kv[l], NULL, q, 0, rows, out, NULL));
    multiply(h, out, wo + square, rows, dim, dim, 1);
    const size_t ffn = (size_t)l * dim * shape.hidden;
    normalise(normed, h, rms_ffn + l * dim, rows, dim);
    multiply(gate, normed, w1 + ffn, rows, dim, shape.hidden, 0);
    multiply(up, normed, w3 + ffn, rows, dim, shape.hidden, 0);
    for (size_t i = 0; i < hidden; ++i) gate[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
    multiply(h, gate, w2 + ffn, rows, shape.hidden, dim, 1);
  }
  normalise(h, h, rms_final, rows, dim);
  free(tokens), free(positions), free(normed), free(q), free(k), free(v), free(out), free(gate), free(up);
}

static int32_t likeliest(const float *x) {
  int32_t best = 0;
  float most = -INFINITY;
  for (int t = 0; t < shape.vocab; ++t) {
    float logit = 0;
    for (int i = 0; i < shape.dim; ++i) logit += embedding[(size_t)t * shape.dim + i] * x[i];
    if (logit > most) most = logit, best = t;
  }
  return best;
}

/* ---- text ---- */

static char **pieces;
static float *scores;

static void load_tokenizer(const char *path) {
  size_t size;
  const char *at = (const char *)file(path, &size) + sizeof(int32_t);
  pieces = memory(shape.vocab, sizeof *pieces), scores = memory(shape.vocab, sizeof *scores);
  for (int t = 0; t < shape.vocab; ++t) {
    int32_t length;
    memcpy(&scores[t], at, 4), memcpy(&length, at + 4, 4);
    pieces[t] = memory(length + 1, 1), memcpy(pieces[t], at + 8, length), at += 8 + length;
  }
}
static int32_t find(const char *text) {
  for (int32_t t = 0; t < shape.vocab; ++t)
    if (strcmp(pieces[t], text) == 0) return t;
  return -1;
}
/* Pairs of tokens become one, the best by score first. */
static int encode(const char *text, int32_t *tokens) {
  int n = 0;
  tokens[n++] = 1; /* begins a sequence */
  if (*text) tokens[n++] = find(" ");
  for (; *text; ++text) {
    const char one[2] = {*text, 0};
    const int32_t token = find(one);
    tokens[n++] = token >= 0 ? token : (unsigned char)*text + 3;
  }
  for (;;) {
    int at = -1;
    int32_t best = 0;
    for (int i = 1; i + 1 < n; ++i) {
      char both[512];
      snprintf(both, sizeof both, "%s%s", pieces[tokens[i]], pieces[tokens[i + 1]]);
      const int32_t token = find(both);
      if (token >= 0 && (at < 0 || scores[token] > scores[best])) at = i, best = token;
    }
    if (at < 0) return n;
    tokens[at] = best, memmove(tokens + at + 1, tokens + at + 2, (--n - at - 1) * sizeof *tokens);
  }
}
static void print(const int32_t *tokens, int count) {
  for (int i = 1; i < count; ++i) {
    unsigned byte;
    const char *piece = pieces[tokens[i]];
    if (sscanf(piece, "<0x%02X>", &byte) == 1) putchar((int)byte);
    else fputs(i == 1 && piece[0] == ' ' ? piece + 1 : piece, stdout);
  }
  putchar('\n');
}

int main(int argc, char **argv) {
  const int count = argc - 4;
  if (count < 1 || count > max_prompts)
    return fprintf(stderr, "usage: %s CHECKPOINT TOKENIZER LENGTH PROMPT...\n", argv[0]), 2;
  const int length = atoi(argv[3]);
  load(argv[1]), load_tokenizer(argv[2]), allocate();

  const chunkattn_tree_config config = {
      .version = CHUNKATTN_C_VERSION, .chunk_size = chunk_size, .max_chunks = max_chunks};
  chunkattn_tree *tree = chunkattn_tree_create(&config);
  chunkattn_plan *plan = chunkattn_step_plan_create();
  must(tree == NULL || plan == NULL);
  chunkattn_sequence *sequences[max_prompts];
  size_t longest = length > 0 ? (size_t)length : 0;
  for (int i = 0; i < count; ++i)
    if (strlen(argv[4 + i]) > longest) longest = strlen(argv[4 + i]);
  int32_t *tokens = memory(longest + 2, sizeof *tokens);
  for (int i = 0; i < count; ++i)
    must(chunkattn_tree_insert(tree, tokens, encode(argv[4 + i], tokens), NULL, &sequences[i]));

  long computed = 0;
  int live[max_prompts], num_live = count;
  for (int i = 0; i < count; ++i) live[i] = i;
  while (num_live > 0) {
    chunkattn_step *step = chunkattn_step_begin(tree);
    must(step == NULL);
    for (int i = 0; i < num_live; ++i) {
      chunkattn_added added; /* one that waits for another's K/V is added to a later step */
      must(chunkattn_step_add(step, sequences[live[i]], 0, NULL, NULL, 0, &added));
    }
    must(chunkattn_step_build(step, plan));
    if (chunkattn_step_num_rows(step) == 0) fprintf(stderr, "the texts take more than %d chunks\n", max_chunks), exit(1);
    computed += chunkattn_step_num_rows(step);
    float *x;
    forward(step, plan, &x);
    must(chunkattn_step_finish(step));
    chunkattn_row rows[max_prompts];
    const int num_rows = (int)chunkattn_step_rows(step, rows, max_prompts);
    must(num_rows < 0);
    for (int i = 0; i < num_rows; ++i) {
      const int32_t next = likeliest(x + (size_t)(rows[i].first_row + rows[i].num_rows - 1) * shape.dim);
      if (next != 1) must(chunkattn_step_commit(step, &rows[i], &next, 1));
    }
    free(x);
    chunkattn_step_destroy(step); /* an output that was not committed ends its sequence */
    int still = 0;
    for (int i = 0; i < num_live; ++i) {
      chunkattn_sequence_info info;
      must(chunkattn_sequence_get_info(sequences[live[i]], &info));
      if (info.size < length && info.uncomputed > 0) live[still++] = live[i];
    }
    num_live = still;
  }
  for (int i = 0; i < count; ++i) {
    chunkattn_sequence_info info;
    must(chunkattn_sequence_get_info(sequences[i], &info));
    must(chunkattn_sequence_tokens(sequences[i], 0, info.size, tokens));
    print(tokens, (int)info.size);
    chunkattn_sequence_destroy(sequences[i]);
  }
  chunkattn_tree_stats stats;
  must(chunkattn_tree_get_stats(tree, &stats));
  fprintf(stderr, "%ld rows computed; of %d prompt tokens %d were shared\n", computed, (int)stats.prompt_tokens,
          (int)(stats.cached_tokens + stats.pending_tokens));
  chunkattn_plan_destroy(plan), chunkattn_tree_destroy(tree), chunkattn_attention_destroy(attention);
  free(tokens);
  return 0;
}
