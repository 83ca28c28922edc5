/* The prefix tree for programs in C, and for languages that call C: int32 tokens, a chunk size and
 * a retention policy chosen at run time. chunkattn.h has attention over what the tree holds; this
 * header alone is enough for routers, simulators, and engines with kernels of their own. Its
 * functions are in tree.ipp. Experimental, as chunkattn.h says.
 *
 * Results: functions that return int return 0, CHUNKATTN_FAILED or, where it is named,
 * CHUNKATTN_OUT_OF_CHUNKS. Those that return a pointer return NULL after a failure, those that
 * return int64_t -1. chunkattn_error() says then which argument was wrong, its value and what was
 * expected; what the call was to change is as before, and outputs are not written. Nothing throws
 * or ends the process.
 *
 * Ownership: what a *_create() or chunkattn_step_begin() returns, and a handle that a call puts
 * into `out`, is the caller's until the *_destroy() of its kind. NULL may be destroyed. Handles may
 * be destroyed after their tree, which is then all that can be done with them. Arrays that a call
 * takes are read within the call.
 *
 * Threads: calls with a tree, and with handles of it, are made by one thread at a time: the caller
 * locks. Sequences, steps and pins may be destroyed by any thread at any time; a sequence leaves
 * then with the next call that changes the tree. A mirror is an object of its own: one thread at a
 * time, without the tree's lock. Events, and what their sink calls, belong to the tree's calls.
 *
 * Structs: fill them with zeros first; a zero stands for what is usual.
 */
#ifndef CHUNKATTN_C_TREE_H
#define CHUNKATTN_C_TREE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define CHUNKATTN_C_API __attribute__((visibility("default")))
#else
#define CHUNKATTN_C_API
#endif

/** The version of this interface. */
#define CHUNKATTN_C_VERSION 3

/** Results of functions. */
enum { CHUNKATTN_FAILED = 1, CHUNKATTN_OUT_OF_CHUNKS = 2 };

/** The interface of the library that was loaded: CHUNKATTN_C_VERSION if it fits this header. */
CHUNKATTN_C_API int chunkattn_c_version(void);

/** Why the last call of this thread that failed has failed; valid until the next one does. */
CHUNKATTN_C_API const char* chunkattn_error(void);

/* ---- the tree ------------------------------------------------------------------------------ */

/** Finds which prefixes of prompts are stored, and hands out chunks for what is new. */
typedef struct chunkattn_tree chunkattn_tree;
/** A live sequence: a prompt and what was generated after it. Destroying it lets it leave. */
typedef struct chunkattn_sequence chunkattn_sequence;
/** What an engine computes at once. Destroying it cancels it, or gives its outputs up. */
typedef struct chunkattn_step chunkattn_step;
/** A prefix that is not evicted. Destroying it unpins. */
typedef struct chunkattn_pin chunkattn_pin;

/** How sequences share chunks. */
enum {
  CHUNKATTN_SHARE_TOKENS = 0, /**< any common prefix, exact to the token */
  CHUNKATTN_SHARE_CHUNKS = 1  /**< whole chunks: block tables for paged kernels */
};

/** What a tree is made with. See TreeOptions and RetentionOptions of the C++ library. */
typedef struct chunkattn_tree_config {
  int32_t version;        /**< CHUNKATTN_C_VERSION */
  int32_t chunk_size;     /**< tokens per chunk: 16, 32, 64 or 128 */
  int64_t max_chunks;     /**< there are chunks 0 to max_chunks - 1; 1 to 2^31 - 1 */
  int32_t sharing;        /**< CHUNKATTN_SHARE_TOKENS or CHUNKATTN_SHARE_CHUNKS */
  int32_t min_run;        /**< a fork copies a private tail shorter than this; 0: chunk_size / 2 */
  int32_t no_retention;   /**< not 0: chunks are free once no sequence uses them; 0: cached */
  int32_t by_priority;    /**< not 0: of what is cached, lower priorities go first */
  int32_t learns;         /**< not 0: then what is worth least by reuse, not what is oldest */
  int32_t fair;           /**< not 0: tenants have shares, see chunkattn_tree_set_tenant() */
  int64_t high_watermark; /**< chunks in use above which a leaving sequence evicts; 0: none */
  int64_t low_watermark;  /**< chunks in use at which that eviction stops; 0: high_watermark */
  int64_t max_pinned;     /**< chunks that all pins together may cover */
  int64_t ttl;            /**< unused for so long, expire() evicts; below 2^32; 0: never */
} chunkattn_tree_config;

/** How a prompt joins. NULL stands for zeros. */
typedef struct chunkattn_insert_options {
  uint64_t tenant;         /**< whom it shares K/V with: the same tenant ... */
  uint64_t adapter;        /**< ... and the same weights */
  int64_t public_length;   /**< the first tokens, which all tenants of the adapter share */
  int64_t max_reuse;       /**< tokens from here on are computed even if cached; -1: all; 0: none */
  int32_t priority;        /**< of a tree by_priority: larger stays longer */
  int32_t no_output;       /**< not 0: the last token is not computed again if it is cached */
  int32_t compute_pending; /**< not 0: computes what others are still to compute, never waits */
  int32_t preempted;       /**< not 0: it comes back, and counts apart in the statistics */
} chunkattn_insert_options;

/** How much of a prompt is there. */
typedef struct chunkattn_match {
  int64_t cached;  /**< first tokens whose K/V is written */
  int64_t pending; /**< further tokens whose K/V a live sequence has still to compute */
} chunkattn_match;

/** Counts since the tree was made, and its present state: see TreeStats of the C++ library. */
typedef struct chunkattn_tree_stats {
  uint64_t inserts, leaves, forks;
  uint64_t prompt_tokens, cached_tokens, pending_tokens;
  uint64_t preempted_inserts, preempted_tokens, preempted_cached_tokens;
  uint64_t splits, copied_tokens, merged_tokens, published_tokens;
  uint64_t evicted_tokens, evicted_chunks;
  uint64_t failed_inserts, failed_adds;
  uint64_t clears, steps, cancelled_steps, abandoned_steps;
  int64_t live_sequences, leaving_sequences;
  int64_t nodes, used_chunks, retained_chunks, stored_tokens;
} chunkattn_tree_stats;

/** An empty tree. */
CHUNKATTN_C_API chunkattn_tree* chunkattn_tree_create(const chunkattn_tree_config* config);
/** Its sequences, steps, pins and events are orphans afterwards: they can only be destroyed. */
CHUNKATTN_C_API void chunkattn_tree_destroy(chunkattn_tree* tree);

/** Adds a sequence with the tokens of a prompt, which shares the K/V of the longest prefix that the
 * tree has and gets chunks for the rest. Cached chunks are evicted for it as needed.
 *
 *  @param num_tokens  1 to 2^30
 *  @param out         gets the sequence
 *  @return also CHUNKATTN_OUT_OF_CHUNKS */
CHUNKATTN_C_API int chunkattn_tree_insert(chunkattn_tree* tree, const int32_t* tokens,
                                          int64_t num_tokens,
                                          const chunkattn_insert_options* options,
                                          chunkattn_sequence** out);
/** What insert() would find. Changes nothing, not even what is evicted next. */
CHUNKATTN_C_API int chunkattn_tree_match(const chunkattn_tree* tree, const int32_t* tokens,
                                         int64_t num_tokens,
                                         const chunkattn_insert_options* options,
                                         chunkattn_match* out);
/** The most chunks that insert() would take of chunkattn_tree_chunks_available(). */
CHUNKATTN_C_API int64_t chunkattn_tree_chunks_needed(const chunkattn_tree* tree,
                                                     const int32_t* tokens, int64_t num_tokens,
                                                     const chunkattn_insert_options* options);
/** Chunks that are free, or cached and not in use. */
CHUNKATTN_C_API int64_t chunkattn_tree_chunks_available(const chunkattn_tree* tree);
/** One more than the largest chunk handed out so far: K/V memory covers these. */
CHUNKATTN_C_API int64_t chunkattn_tree_num_chunks(const chunkattn_tree* tree);
CHUNKATTN_C_API int chunkattn_tree_get_stats(const chunkattn_tree* tree, chunkattn_tree_stats* out);

/** Of a tree made with `fair`: what a tenant may keep, from its next insert() on.
 *
 *  @param weight  of its share of what is cached, 1 to 2^20; 1 where this was never called
 *  @param quota   chunks' worth of tokens that it may keep cached; -1: no limit */
CHUNKATTN_C_API int chunkattn_tree_set_tenant(chunkattn_tree* tree, uint64_t tenant, int32_t weight,
                                              int64_t quota);

/** Forgets all that is cached, as weights change; live sequences keep theirs alone. */
CHUNKATTN_C_API int chunkattn_tree_clear(chunkattn_tree* tree);
/** Evicts until at most `chunks` are in use, or nothing unpinned is cached. Returns those freed. */
CHUNKATTN_C_API int64_t chunkattn_tree_trim(chunkattn_tree* tree, int64_t chunks);
/** Evicts what was unused for the config's ttl. Returns the tokens evicted.
 *
 *  @param now  by the caller's clock, which begins at 0 and does not go back */
CHUNKATTN_C_API int64_t chunkattn_tree_expire(chunkattn_tree* tree, uint64_t now);

/** Pins the written prefix of the tokens. `out` gets NULL if none is written, or if more than
 * max_pinned chunks would be pinned. Fails in a tree whose max_pinned is 0. */
CHUNKATTN_C_API int chunkattn_tree_pin(chunkattn_tree* tree, const int32_t* tokens,
                                       int64_t num_tokens, const chunkattn_insert_options* options,
                                       chunkattn_pin** out);
/** Tokens that it pins: fewer than at first if live sequences needed them, 0 after clear(). */
CHUNKATTN_C_API int64_t chunkattn_pin_size(const chunkattn_pin* pin);
CHUNKATTN_C_API void chunkattn_pin_destroy(chunkattn_pin* pin);

/* ---- sequences ----------------------------------------------------------------------------- */

/** What is known of a sequence. Counts are of tokens. */
typedef struct chunkattn_sequence_info {
  uint64_t id;          /**< its number in the tree, never used again */
  uint64_t waits_for;   /**< the sequence that computes the first pending token; 0: none */
  int64_t size;         /**< known: the prompt, and what was committed or appended */
  int64_t cached;       /**< of the prompt, found with their K/V when it joined */
  int64_t uncomputed;   /**< known, and in no step yet */
  int64_t scheduled;    /**< leading positions that are computed or in a step */
  int64_t written;      /**< leading tokens whose K/V is in place */
  int64_t pending;      /**< that other sequences have still to compute */
  int64_t shared;       /**< leading tokens that other live sequences have, too */
  int64_t num_reserved; /**< positions after the last token, for drafts and outputs to come */
} chunkattn_sequence_info;

/** A part of a chunk that holds consecutive positions of a sequence. */
typedef struct chunkattn_piece {
  int32_t chunk;    /**< index of the chunk */
  int32_t begin;    /**< offset of the first token in it */
  int32_t length;   /**< tokens */
  int32_t position; /**< position of the first token in the sequence */
} chunkattn_piece;

CHUNKATTN_C_API int chunkattn_sequence_get_info(const chunkattn_sequence* sequence,
                                                chunkattn_sequence_info* out);
/** Adds known tokens at the end, whose K/V is still to be computed: a user's next message.
 *  @return also CHUNKATTN_OUT_OF_CHUNKS */
CHUNKATTN_C_API int chunkattn_sequence_append(chunkattn_sequence* sequence, const int32_t* tokens,
                                              int64_t num_tokens);
/** A second sequence with the first `length` tokens, sharing their K/V.
 *
 *  @param length  1 to the sequence's size, or -1: all
 *  @return also CHUNKATTN_OUT_OF_CHUNKS */
CHUNKATTN_C_API int chunkattn_sequence_fork(chunkattn_sequence* sequence, int64_t length,
                                            chunkattn_sequence** out);
/** Goes back to the first `length` tokens, the last of which is computed again. It has another id
 * afterwards.
 *  @return also CHUNKATTN_OUT_OF_CHUNKS */
CHUNKATTN_C_API int chunkattn_sequence_truncate(chunkattn_sequence* sequence, int64_t length);
/** Lets it compute what others have still to compute. Returns the number of these tokens; 0: wait
 * for the step that computes them. */
CHUNKATTN_C_API int64_t chunkattn_sequence_take_over(chunkattn_sequence* sequence);
/** Copies `num_tokens` tokens from position `begin` on to `out`. */
CHUNKATTN_C_API int chunkattn_sequence_tokens(const chunkattn_sequence* sequence, int64_t begin,
                                              int64_t num_tokens, int32_t* out);
/** Where the K/V of `length` positions from `begin` on lies, in path order: to swap and to save.
 * Returns the number of pieces, of which the first `capacity` are in `out` (which may be NULL for a
 * capacity of 0). */
CHUNKATTN_C_API int64_t chunkattn_sequence_pieces(const chunkattn_sequence* sequence, int64_t begin,
                                                  int64_t length, chunkattn_piece* out,
                                                  int64_t capacity);
/** The row of a block table: the chunks of its first `kv_len` tokens, or with -1 of those that are
 * known or in a step. For a tree with CHUNKATTN_SHARE_CHUNKS. Returns their number, of which the
 * first `capacity` are in `out`. */
CHUNKATTN_C_API int64_t chunkattn_sequence_blocks(const chunkattn_sequence* sequence,
                                                  int64_t kv_len, int32_t* out, int64_t capacity);
/** The first consecutive positions whose K/V it has to provide and that are in no step: `begin` and
 * `length`, 0 where there are none. */
CHUNKATTN_C_API int chunkattn_sequence_loadable(const chunkattn_sequence* sequence, int64_t* begin,
                                                int64_t* length);
/** Says that the K/V of these positions is in place without a step: read from a file, received. */
CHUNKATTN_C_API int chunkattn_sequence_mark_loaded(chunkattn_sequence* sequence, int64_t begin,
                                                   int64_t length);
CHUNKATTN_C_API void chunkattn_sequence_destroy(chunkattn_sequence* sequence);

/* ---- steps --------------------------------------------------------------------------------- */

/** The plan of a batch: which rows read which K/V. */
typedef struct chunkattn_plan chunkattn_plan;

/** The rows of a sequence in a step, counted over the whole step in the order of add(). */
typedef struct chunkattn_row {
  uint64_t sequence;  /**< its id */
  int32_t index;      /**< sequences that were added before it */
  int32_t position;   /**< of the first row in its sequence */
  int32_t first_row;  /**< its row of q, k, v and out */
  int32_t num_rows;   /**< drafts included */
  int32_t num_drafts; /**< the last of these rows */
  int32_t has_output; /**< 1: the row before the drafts, and theirs, are to be sampled from */
} chunkattn_row;

/** Why a sequence was not added to a step. */
enum {
  CHUNKATTN_ADDED = 0,
  CHUNKATTN_WAITS_FOR_SEQUENCE = 1, /**< another has to compute K/V that it reads */
  CHUNKATTN_WAITS_FOR_STEP = 2,     /**< a step in flight uses memory that it needs */
  CHUNKATTN_NO_CHUNKS = 3,          /**< no chunk is free or evictable */
  CHUNKATTN_NOTHING_TO_COMPUTE = 4  /**< all its tokens are computed: commit, or append */
};

/** The result of adding to a step. */
typedef struct chunkattn_added {
  int32_t reason;        /**< CHUNKATTN_ADDED, or why nothing was */
  int32_t reserved;      /**< 0 */
  uint64_t waits_for;    /**< the sequence or the step that it waits for */
  int64_t blocked_index; /**< of many: the first that could not be added */
  chunkattn_row row;     /**< of one that was added */
} chunkattn_added;

/** K/V rows that are copied before anything is written: of forks and of accepted drafts. */
typedef struct chunkattn_copy {
  int32_t source_chunk, source_begin;
  int32_t target_chunk, target_begin;
  int32_t length; /**< tokens */
} chunkattn_copy;

/** Opens a step. A tree has one open, and up to 4 in flight. */
CHUNKATTN_C_API chunkattn_step* chunkattn_step_begin(chunkattn_tree* tree);
/** Adds the next tokens of a sequence that are not computed yet, at most `max_tokens` of them (0:
 * all), then drafts, as far as `max_tokens` allows.
 *
 *  @param drafts   [num_drafts] guesses of the tokens after its last one; or NULL for 0
 *  @param parents  [num_drafts] of a tree of drafts: the draft that each follows, or -1; or NULL
 *  @param out      whether it was added, or why not, which is no failure */
CHUNKATTN_C_API int chunkattn_step_add(chunkattn_step* step, chunkattn_sequence* sequence,
                                       int64_t max_tokens, const int32_t* drafts,
                                       const int32_t* parents, int64_t num_drafts,
                                       chunkattn_added* out);
/** Adds the next tokens of many sequences, at most `max_tokens` of each (0: all): of all or of
 * none. */
CHUNKATTN_C_API int chunkattn_step_add_all(chunkattn_step* step,
                                           chunkattn_sequence* const* sequences,
                                           int64_t num_sequences, int64_t max_tokens,
                                           chunkattn_added* out);
/** Of what was added so far. */
CHUNKATTN_C_API int64_t chunkattn_step_num_rows(const chunkattn_step* step);

/** A plan for steps; keep one over many. It is destroyed by chunkattn_plan_destroy(). */
CHUNKATTN_C_API chunkattn_plan* chunkattn_step_plan_create(void);
CHUNKATTN_C_API void chunkattn_plan_destroy(chunkattn_plan* plan);
/** Makes the plan of an open step, after the last add(); without it the step is not submitted or
 * finished. It is valid until the step ends, or until it is made for another. */
CHUNKATTN_C_API int chunkattn_step_build(chunkattn_step* step, chunkattn_plan* plan);
/** The tokens to compute: the model's input ids. As long as the step's plan is valid.
 *
 *  @param out          [num_rows]
 *  @param placeholder  stands for tokens that are not known yet: outputs of a step in flight */
CHUNKATTN_C_API int chunkattn_step_tokens(const chunkattn_step* step, int32_t placeholder,
                                          int32_t* out, int64_t num_rows);
/** Their positions in their sequences: for the rotary embedding. */
CHUNKATTN_C_API int chunkattn_step_positions(const chunkattn_step* step, int32_t* out,
                                             int64_t num_rows);
/** For other kernels: where the K/V of each row goes, chunk * chunk_size + offset; -1: it is there.
 *
 *  @param out  [num_rows] */
CHUNKATTN_C_API int chunkattn_plan_slots(const chunkattn_plan* plan, int64_t* out,
                                         int64_t num_rows);
/** For other kernels: what is copied before anything is written. Returns the number of copies, of
 * which the first `capacity` are in `out`. chunkattn_write() makes them itself. */
CHUNKATTN_C_API int64_t chunkattn_plan_copies(const chunkattn_plan* plan, chunkattn_copy* out,
                                              int64_t capacity);

/** Says that the kernels are queued on a device; for those that run at once leave it out. */
CHUNKATTN_C_API int chunkattn_step_submit(chunkattn_step* step);
/** Says that the kernels have run: the K/V is written, and outputs can be committed. */
CHUNKATTN_C_API int chunkattn_step_finish(chunkattn_step* step);
/** The rows to sample from, of a finished step, in the order of add(). Returns their number, of
 * which the first `capacity` are in `out`. */
CHUNKATTN_C_API int64_t chunkattn_step_rows(const chunkattn_step* step, chunkattn_row* out,
                                            int64_t capacity);
/** Commits what was sampled from a row: a token; with drafts the accepted ones, then one more. */
CHUNKATTN_C_API int chunkattn_step_commit(chunkattn_step* step, const chunkattn_row* row,
                                          const int32_t* outputs, int64_t num_outputs);
/** The same for a tree of drafts.
 *
 *  @param leaf  the last draft of the accepted branch, which the outputs follow; -1: none is */
CHUNKATTN_C_API int chunkattn_step_commit_branch(chunkattn_step* step, const chunkattn_row* row,
                                                 int32_t leaf, const int32_t* outputs,
                                                 int64_t num_outputs);
/** Commits one output for each of the rows: of all or of none. */
CHUNKATTN_C_API int chunkattn_step_commit_all(chunkattn_step* step, const int32_t* outputs,
                                              int64_t num_outputs);
CHUNKATTN_C_API void chunkattn_step_destroy(chunkattn_step* step);
/** Says that no device runs a step of this tree: memory of steps that were destroyed in flight can
 * be used again. */
CHUNKATTN_C_API int chunkattn_tree_device_idle(chunkattn_tree* tree);

/* ---- events -------------------------------------------------------------------------------- */

/** Publishes what prompts can find in a tree, for routers. */
typedef struct chunkattn_events chunkattn_events;
/** What prompts find in a tree, rebuilt elsewhere from its events. */
typedef struct chunkattn_mirror chunkattn_mirror;

enum { CHUNKATTN_STORED = 0, CHUNKATTN_EVICTED = 1, CHUNKATTN_CLEARED = 2 };

/** One change of what prompts can find: see CacheEvent of the C++ library. It may be sent as it is
 * between machines of one byte order. */
typedef struct chunkattn_event {
  uint64_t stream, number; /**< whose events, and which of them: without gaps from 1 on */
  uint64_t span, parent;   /**< the span of these tokens, and of the token before them */
  uint64_t tenant, adapter;
  int32_t is_public; /**< 1: of all tenants */
  int32_t kind;      /**< CHUNKATTN_STORED, ... */
  int32_t position, length;
  int32_t first_chunk, first_offset;
} chunkattn_event;

/** All that prompts can find at one time. */
typedef struct chunkattn_snapshot {
  uint64_t stream, number;      /**< of the last event before it */
  int32_t unit;                 /**< tokens that are found or not as one */
  int32_t reserved;             /**< 0 */
  const chunkattn_event* spans; /**< [num_spans], each after its parent */
  int64_t num_spans;
  const int32_t* tokens; /**< [num_tokens]: those of each span, one after the other */
  int64_t num_tokens;
} chunkattn_snapshot;

/** Gets each event within the call that causes it, with the tokens of a stored one, else NULL. It
 * calls nothing of the tree, and does not unwind. */
typedef void (*chunkattn_event_sink)(void* context, const chunkattn_event* event,
                                     const int32_t* tokens);

/** `sink` gets the tree's events from now on, until this is destroyed. A tree may have several.
 *
 *  @param stream  not 0: of these events; 0: another one for each, also after a restart */
CHUNKATTN_C_API chunkattn_events* chunkattn_events_create(chunkattn_tree* tree,
                                                          chunkattn_event_sink sink, void* context,
                                                          uint64_t stream);
/** All that can be found now. What it points to is valid until the next snapshot of `events`. */
CHUNKATTN_C_API int chunkattn_events_snapshot(chunkattn_events* events, chunkattn_snapshot* out);
CHUNKATTN_C_API void chunkattn_events_destroy(chunkattn_events* events);

/** What apply() made of an event. */
enum {
  CHUNKATTN_CHANGED = 0,  /**< it was the next one */
  CHUNKATTN_REPEATED = 1, /**< it was known, and is ignored */
  CHUNKATTN_MISSED = 2    /**< others are missing before it: load a snapshot */
};

/** An empty mirror of a tree with this chunk size and sharing. */
CHUNKATTN_C_API chunkattn_mirror* chunkattn_mirror_create(int32_t chunk_size, int32_t sharing);
/** Takes over one event. `out` gets CHUNKATTN_CHANGED, ...
 *
 *  @param tokens  [event->length] of a stored one */
CHUNKATTN_C_API int chunkattn_mirror_apply(chunkattn_mirror* mirror, const chunkattn_event* event,
                                           const int32_t* tokens, int32_t* out);
/** Becomes what the snapshot says. */
CHUNKATTN_C_API int chunkattn_mirror_load(chunkattn_mirror* mirror,
                                          const chunkattn_snapshot* snapshot);
/** How many of the first tokens the tree would find with their K/V. */
CHUNKATTN_C_API int64_t chunkattn_mirror_match(const chunkattn_mirror* mirror,
                                               const int32_t* tokens, int64_t num_tokens,
                                               const chunkattn_insert_options* options);
/** The number of the last event that it knows of. */
CHUNKATTN_C_API int64_t chunkattn_mirror_number(const chunkattn_mirror* mirror);
CHUNKATTN_C_API void chunkattn_mirror_destroy(chunkattn_mirror* mirror);

#ifdef __cplusplus
}
#endif

#endif
