// The C ABI: plain structs that Python fills in. This header is their only description, since Python
// reads it too (kernels/cpu/records.py, base/c_header.py): one declaration ends with one semicolon,
// a number is written as digits. `library.h` has the functions.
//
// A forward pass is a flat list of records. Pointers in a record are fixed for the life of the
// program; what changes from step to step is in `HrStep`. N tokens, B entries, R sampled rows, T rows
// of texts that pictures attend to, or of a strip of a convolution.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Weight kinds. 1 … 8, 10, 14 and 15 are GGUF block formats in panels, 9 is in two planes, 11 to 13
// are of safetensors, and from 16 on activations are floats.
enum HrKind {
  HR_Q4_0 = 1,
  HR_Q4_1 = 2,
  HR_Q5_0 = 3,
  HR_Q5_1 = 4,
  HR_Q8_0 = 5,
  HR_Q4_K = 6,
  HR_Q5_K = 7,
  HR_Q6_K = 8,
  HR_Q8_0_PLANES = 9,  // Q8_0 in the file: a head's, see layout.h and bound.h
  HR_MXFP4 = 10,
  HR_INT4 = 11, HR_INT8 = 12, HR_NVFP4 = 13,
  HR_IQ4_NL = 14, HR_IQ4_XS = 15,
  HR_F32 = 16, HR_F16 = 17, HR_BF16 = 18,
  HR_E4M3 = 21,
  HR_I8 = 19,   // KV only: codes with a scale per token and head
  HR_K8V4 = 20  // KV only: K like HR_I8, V in four bits (value_codes.h)
};

enum HrActivation { HR_SILU = 0, HR_GELU_TANH = 1, HR_GELU = 2, HR_TANH = 3, HR_CLAMPED = 4,
                    HR_SIGMOID = 5, HR_RELU2 = 6, HR_RELU = 7, HR_IDENTITY = 8 };

enum HrIndex { HR_TOKENS = 0, HR_POSITIONS = 1, HR_TYPES = 2, HR_LABELS = 3 };  // of a step

enum HrRows { HR_ROWS_N = 0, HR_ROWS_R = 1, HR_ROWS_T = 2 };  // which count of the step bounds an op's rows

// Every code of a record, and the struct that it has.
#define HR_OPS(EACH) \
  EACH(EMBED, 1, HrEmbed) EACH(NORM, 2, HrNorm) EACH(QUANTISE, 3, HrQuantise) \
  EACH(LINEAR, 4, HrLinear) EACH(ROPE, 5, HrRope) EACH(ATTENTION, 6, HrAttention) \
  EACH(GATED, 7, HrGated) EACH(SELECT, 8, HrRowsOp) EACH(ADD, 9, HrRowsOp) \
  EACH(SOFTCAP, 10, HrRowsOp) EACH(GATE_UP, 11, HrGateUp) EACH(LAYER_NORM, 12, HrLayerNorm) \
  EACH(ACTIVATE, 13, HrGated) EACH(BIDIRECTIONAL, 14, HrBidirectional) \
  EACH(ROUTE, 15, HrRoute) EACH(PLACE, 16, HrExperts) EACH(EXPERTS_UP, 17, HrExperts) \
  EACH(EXPERTS_DOWN, 18, HrExperts) EACH(SCALE, 19, HrRowsOp) EACH(LORA_DOWN, 20, HrLora) \
  EACH(LORA_UP, 21, HrLora) EACH(DRAW, 22, HrDraw) EACH(BEST, 23, HrHead) \
  EACH(PICK, 24, HrHead) EACH(SAMPLE, 25, HrSample) EACH(BOUND, 26, HrHead) \
  EACH(HEADS, 27, HrHeads) EACH(COLUMNS, 28, HrColumns) EACH(CONV, 29, HrConv) \
  EACH(RECURRENCE, 30, HrRecurrence) EACH(MULTIPLY, 31, HrMultiply) \
  EACH(EXCHANGE, 32, HrExchange) EACH(AGREE, 33, HrAgree) EACH(LOWER, 34, HrHead) \
  EACH(HANDOVER, 35, HrHandover) EACH(EXPERTS_SUM, 36, HrExperts) \
  EACH(SCATTER, 37, HrScatter) EACH(BAGS, 38, HrBags) EACH(MODULATE, 39, HrModulate) \
  EACH(AROUND, 40, HrAround) EACH(GROUP_NORM, 41, HrGroupNorm)

enum HrCode {
#define HR_EACH(NAME, CODE, STRUCT) HR_OP_##NAME = CODE,
  HR_OPS(HR_EACH)
#undef HR_EACH
};

// Rows of activations as int8, six rows interleaved: what a product walks through is one
// stream. Row r, unit u (32 of K): lane r % 6 of six[(r / 6) · stride + u].
#define HR_SIX 6

typedef struct {
  float scale;     // value = code · scale
  float sum;       // scale · Σ codes
  int32_t low32;   // −32 · Σ codes of the first sixteen: a sum's begin where the code 32 means zero
  int32_t high32;  // −32 · Σ codes of the others
  int32_t all16;   // −16 · Σ codes
  int32_t all128;  // −128 · Σ codes
} HrUnit;

typedef struct {         // a cache line: one row touches one a unit
  int8_t codes[32];
  HrUnit unit;
  int32_t unused[2];
} HrLane;

typedef struct {
  HrLane lanes[HR_SIX];
} HrSix;

typedef struct {
  HrSix* six;      // null: absent
  int64_t stride;  // HrSix between blocks of six rows: K / 32
} HrQuantised;

enum HrInto {
  HR_STORE = 0,  // y = x · wᵀ + bias
  HR_ADD = 1,    // y += x · wᵀ + bias
  HR_KEEP = 2,   // y is [rows] HrBest: the highest of each row, no bias; see head.h
  HR_ACTIVATED = 4  // y = act(x · wᵀ + bias): this plus its HrActivation
};

typedef struct {
  const uint8_t* data;  // panels of 16 outputs, 64-byte aligned
  const uint8_t* low;   // the plane of low bits; null: behind the other one, or there is none
  const float* bias;    // [out] or null
  float* y;             // [rows, out]
  int64_t y_stride;     // floats
  int32_t kind;
  int32_t out;
  int32_t in;
  int32_t accumulate;   // HrInto
} HrPart;

typedef struct {
  HrQuantised x;
  const float* dense;   // the same rows in fp32: read by parts of a dense kind
  int64_t dense_stride;
  const HrPart* parts;
  int32_t count;
  int32_t rows;
} HrLinear;

typedef struct {
  float value;
  int32_t token;        // INT32_MAX: there was no number yet
} HrBest;

typedef struct {        // a cache line: is it worth the while to bound? Zeros at first
  int64_t panels;       // candidates that this thread has computed in the last step
  int64_t skip;         // of thread 0: steps to come that do without bounds
  int64_t wait;         // of thread 0: how many those were the last time
  int64_t with;         // of thread 0: steps with bounds so far,
  int64_t without;      //   those that did without,
  int64_t left;         //   and the candidates of all steps with bounds
  int64_t unused[2];
} HrWorth;

typedef struct {        // BEST: each thread's best of every row; PICK: the best of all threads
  HrLinear linear;      // of one part, whose y is not used
  HrBest* best;         // [threads, stride]
  int64_t stride;       // at least as many as rows
  int64_t* tokens;      // [R]
  // BOUND before BEST, where the part is of HR_Q8_0_PLANES: in a step of at most `bounded` rows
  // BEST computes those panels alone that BOUND leaves as candidates. See bound.h.
  float* bounds;        // [bounded, panels]: no logit of the panel is above it; or null
  float* lower;         // [threads, stride]: some logit of the row is not below it; or null
  HrWorth* worth;       // [threads]; or null
  int64_t bounded;      // at most HR_BOUNDED; 0: there is no BOUND before
  HrBest* found;        // [R], in place of tokens: what this rank has found; null: there is no other
  int64_t first;        // the token that the part's first output stands for
  // LOWER behind BOUND, where there are other ranks: the lower bounds that each has seen.
  float* lowest;        // [ranks, stride], in memory of all; null: there is no other
  int32_t ranks;
  int32_t rank;
} HrHead;

#define HR_BOUNDED 4

typedef struct {
  const uint8_t* data;  // rows as they lie in the file
  int64_t row_bytes;
  float* y;
  int64_t y_stride;
  float scale;
  int32_t kind;
  int32_t vocab;         // rows of the table: every index is below it
  int32_t size;
  int32_t index;         // HrIndex
  int32_t rows;          // HrRows
} HrEmbed;

// Embedding bags: bags.h.
typedef struct {          // a table, of which each row of the step reads a bag
  const uint8_t* data;    // [rows, size] of F32, F16, BF16 or HR_I8
  const float* scales;    // [rows] of HR_I8: a number is (code − 128) · scale; else null
  int64_t row_bytes;
  int32_t kind;
  int32_t size;
  int32_t first;          // the first of its columns in y
  int32_t bag;            // which of HrStep.bags
  int32_t mean;           // 1: the sum is divided by the number of ids
  int32_t unused;
} HrTable;

typedef struct {          // y: the columns of x, then numbers of the step, then of each table a bag
  const float* x;         // null: there is none
  int64_t x_stride;
  float* y;
  int64_t y_stride;
  const HrTable* tables;
  int32_t count;          // of tables
  int32_t size;           // columns of x
  int32_t numbers;        // how many of HrStep.numbers: all, or 0; over R rows, of HrStep.times
  int32_t rows;           // HrRows
} HrBags;

typedef struct {          // bags of one table: ids of bag i from starts[i] to before starts[i + 1]
  const int64_t* ids;     // each is a row of the table
  const int64_t* starts;
  const float* weights;   // a factor for each id; null: 1
  const int64_t* of;      // [N], ascending: the bag of each row; null: row n has bag n
} HrBag;

typedef struct {
  const float* x;         // [count] rows; x, places and count are set before each run
  int64_t x_stride;
  const int64_t* places;  // rows of y, each once
  int64_t count;
  float* y;
  int64_t y_stride;
  int32_t size;
  int32_t adds;           // y += x
} HrScatter;

typedef struct {
  const float* x;
  int64_t x_stride;
  float* residual;       // null: plain norm of x; else residual += x first and is what is normed
  int64_t residual_stride;
  const float* weight;
  float* y;              // null: not wanted in fp32
  int64_t y_stride;
  HrQuantised q;
  float eps;
  float offset;
  int32_t size;
  int32_t rows;
} HrNorm;

typedef struct {
  const float* x;
  int64_t x_stride;
  float* residual;       // as in HrNorm
  int64_t residual_stride;
  const float* weight;   // [size]
  const float* bias;     // [size]
  float* y;              // null: not wanted in fp32
  int64_t y_stride;
  HrQuantised q;
  float eps;
  int32_t size;
  int32_t rows;
  int32_t unused;
  int64_t weight_stride; // 0: one weight and bias for all rows; else row e of them is entry e's,
  int64_t bias_stride;   //   and x is multiplied by 1 + weight
} HrLayerNorm;

typedef struct {         // y += factor · x, by the factors of each row's entry
  const float* x;        // [N, size]
  int64_t x_stride;
  const float* factors;  // [B, size]
  int64_t factors_stride;
  float* y;
  int64_t y_stride;
  int64_t size;
} HrModulate;

typedef struct {
  const float* x;
  int64_t x_stride;
  HrQuantised q;
  const int32_t* order;  // which of x is number i; null: all as they lie
  int32_t size;
  int32_t rows;
} HrQuantise;

typedef struct {
  const float* x;        // [rows, 2 · size]: gate, up; ACTIVATE: [rows, size], nothing to multiply
  int64_t x_stride;
  float* y;              // null: not wanted in fp32
  int64_t y_stride;
  HrQuantised q;
  int32_t size;
  int32_t activation;
  int32_t rows;
  int32_t unused;
} HrGated;

typedef struct {         // products with gate and up, activation, product, quantised: no fp32 between
  HrQuantised x;
  HrPart gate;           // y and bias are not used; both of one shape, out a multiple of 32
  HrPart up;
  HrQuantised q;
  int32_t activation;
  int32_t rows;
} HrGateUp;

typedef struct {
  const float* x;
  int64_t x_stride;
  float* y;
  int64_t y_stride;
  int32_t size;
  int32_t rows;          // ADD: rows of x and y (y += f · x); SELECT: y[r] = x[sample_rows[r]]
  float factor;          // over R rows, in place: SOFTCAP y = f · tanh(y / f), SCALE y = f · y
  int32_t unused;
} HrRowsOp;

typedef struct {
  void* k;               // pages [blocks, G], each of E · S values: see pages.h; ROPE: null: none
  void* v;               // null: K is V too
  uint16_t* k_scale;     // bf16 [blocks, G, S] of HR_I8 and HR_K8V4, else null
  uint16_t* v_scale;
  int32_t kind;          // HR_F32, HR_F16, HR_BF16, HR_I8, HR_K8V4
  int32_t block_size;    // S, a multiple of 8
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;      // E, a multiple of 16
  int32_t group;
  const float* bias;     // [G, E]: what keys in codes are kept without; or null
  const float* bias_cos; // [max_context, rotated / 2]: where a position turns it to
  const float* bias_sin;
  const float* turns;    // [2, E, 64]: cosines and sines of the turns within a tile
  int32_t rotated;       // the first numbers of a head that are, 0 … E
  int32_t interleaved;   // pairs are (2i, 2i + 1), else (i, i + rotated / 2)
} HrKv;

enum HrValues {           // where V come from
  HR_VALUES_OWN = 0,       // behind K
  HR_VALUES_NORMED = 1,    // the same, each head scaled to a root mean square of one
  HR_VALUES_KEYS = 2,      // K as they come, scaled so
  HR_VALUES_ELSEWHERE = 3  // K and V are another layer's: there is q alone
};

typedef struct {
  HrKv kv;
  float* qkv;            // [N, (H + 2G) · E], without V where there is none; q is normed and rotated in place
  int64_t stride;
  const float* q_norm;   // [E] or null
  const float* k_norm;
  const float* cos;      // [max_context, rotated / 2]; not read where nothing is rotated
  const float* sin;
  const int32_t* axes;   // [rotated / 2]: the axis of HrStep.turns that turns each pair; or null
  float eps;
  float offset;
  int32_t rotated;       // the first numbers of a head that are, 0 … E
  int32_t interleaved;   // pairs are (2i, 2i + 1), else (i, i + rotated / 2)
  int32_t whole;         // the norms are over all heads together: [H · E] and [G · E]
  int32_t values;        // HrValues
  float growth;          // q is multiplied by 1 + growth · log(1 + ⌊(position + first) / every⌋)
  int32_t every;
  int32_t behind;        // q and k are scaled to a root mean square of one, behind the rotation
  int32_t first;
} HrRope;

typedef struct {
  HrKv kv;
  const float* q;        // [N, H · E] with stride
  int64_t stride;
  float* y;              // null: not wanted in fp32
  int64_t y_stride;
  HrQuantised out;
  const float* sinks;    // [H]: a score that each head has beside those of its positions; or null
  float scale;
  float softcap;         // 0: none
  int32_t rows;          // R: of the sampled tokens alone; y and out then have R rows
  int32_t chunked;       // the group's window is a chunk: a query sees its own, up to itself
  int32_t coarse;        // of KV in codes: queries and weights have eight bits, not fifteen
  int32_t across;        // tokens, entries and lengths are those of HrStep.across
} HrAttention;

typedef struct {         // every token sees all tokens of its own entry, or of its own window
  const float* qkv;      // [N, 3 · H · E]: q, k, v
  int64_t stride;
  float* y;              // [N, H · E]
  int64_t y_stride;
  float scale;
  int32_t heads;
  int32_t head_dim;      // E
  int32_t windowed;      // by HrStep.windows, not by HrStep.query_starts
  const float* kv;       // [T, 2 · H · E]: k, v of HrStep.text_starts, and qkv is q; null: none
  int64_t kv_stride;
  const float* bias;     // [H, 2 · reach]: added to the score of a key d behind at reach − 1 + d
  int64_t reach;         // a multiple of 16, at least an entry's length; 0: there is no bias
} HrBidirectional;

typedef struct {         // rows of pictures around each place, side by side; zeros outside
  const float* x;        // [pictures · lines · columns, size]
  int64_t x_stride;
  float* y;              // [T, side² · size]: rows from `first` on
  int64_t y_stride;
  int64_t first;
  int32_t size;
  int32_t lines;
  int32_t columns;
  int32_t side;          // odd
  int32_t up;            // x is looked at with each row this often in both directions
  int32_t stride;        // from place to place
  int32_t cut;           // lines and columns that are left out behind those repeated
  int32_t unused;
} HrAround;

typedef struct {         // y = act(norm of groups of columns over all rows of a picture)
  const float* x;
  int64_t x_stride;
  float* y;              // may be x
  int64_t y_stride;
  const float* gain;     // [size]
  const float* shift;
  float eps;
  int32_t size;
  int32_t groups;
  int32_t silu;
  int32_t rows;          // HrRows; each of the step's entries has as many
  int32_t unused;
} HrGroupNorm;

// Latent attention beside attention itself: latent.h.
typedef struct {         // a product for each head: part i reads columns from first + i · step on
  HrLinear linear;
  int64_t first;         // multiples of 32 where a part reads codes
  int64_t step;
} HrHeads;

typedef struct {         // `times` runs of `size` columns from x to y
  const float* x;
  int64_t x_stride;
  float* y;
  int64_t y_stride;
  int64_t x_step;        // from one run to the next
  int64_t y_step;
  int32_t size;
  int32_t times;
  int32_t rows;
  int32_t unused;
} HrColumns;

// Mixtures of experts: experts.h.
#define HR_MAX_EXPERT_GROUPS 64

enum HrScores { HR_OVER_ALL = 0, HR_EACH_SIGMOID = 1, HR_EACH_SQRT_SOFTPLUS = 2 };

typedef struct {         // which experts a row goes to: see experts.h
  const float* logits;   // [rows, experts]
  int64_t logits_stride;
  const float* bias;     // [experts] or null: added to the scores for the choice alone
  const float* gains;    // [experts] or null: factors on the shares
  int32_t* chosen;       // [rows, active]
  int64_t chosen_stride;
  float* shares;         // [rows, active]
  int64_t shares_stride;
  float scale;           // factor on all shares
  int32_t experts;
  int32_t active;
  int32_t scores;        // HrScores
  int32_t normalise;     // shares sum up to `scale`
  int32_t groups;        // of experts, at most HR_MAX_EXPERT_GROUPS
  int32_t active_groups;
  int32_t rows;
  int32_t best;          // 1 or 2: so many of a group's experts say what it is worth
  int32_t unused;
} HrRoute;

typedef struct {
  int32_t expert;        // −1: behind the last
  int32_t first;         // its first place, a multiple of six
  int32_t count;         // of its rows
} HrSpan;

typedef struct {         // whole experts are dealt out to ranks: each makes all of its own
  const int32_t* owners; // [experts]: the rank that has each
  int64_t* went;         // [experts]: what each has cost so far: 8 of a step and 1 of a row
  HrSpan* own;           // [experts + 1]: those of `spans` that this rank has
  float* values;         // [places, out] in memory of all ranks: what experts give, unsummed
  int64_t stride;
  int32_t rank;
  int32_t unused;
} HrDeal;

typedef struct {         // PLACE, UP, DOWN, SUM: the experts of ROUTE's choice
  HrQuantised x;         // [rows, in], null where no expert reads codes
  const float* dense;    // the same in fp32, null where none reads floats
  int64_t dense_stride;
  const int32_t* chosen; // [rows, active]
  int64_t chosen_stride;
  const float* shares;
  int64_t shares_stride;
  const HrPart* matrices;  // [experts, 3]: gate, up, down; y and bias are not used
  const float* up_bias;    // [experts, 2 · inner_size]: of gate, of up; or null
  const float* down_bias;  // [experts, out] or null
  HrQuantised placed;    // the rows by expert; null as x
  float* placed_dense;
  int64_t placed_stride;
  HrQuantised inner;     // [places, inner_size]; null where `down` reads floats
  float* inner_dense;    // the same in fp32; null where `down` reads codes
  int64_t inner_stride;
  float* y;              // [rows, out]
  int64_t y_stride;
  HrSpan* spans;         // [experts + 1]: the experts that somebody goes to, ascending
  int32_t* row_of;       // [places]
  float* share_of;       // [places]
  const HrDeal* deal;    // or null: then DOWN sums, and there is no SUM
  int32_t experts;
  int32_t active;
  int32_t in;
  int32_t inner_size;
  int32_t out;
  int32_t activation;
  int32_t rows;
  int32_t inside;        // shares multiply what experts read, and not what they give
} HrExperts;

// Layers that keep a state: recurrence.h.

// A row of HrStep.states: tokens in the entry's state, tokens of the step that are no drafts, then
// twice a checkpoint: behind how many tokens (0: none), into which block.
#define HR_STATE_COLUMNS 6

typedef struct {         // a causal convolution of each channel by itself
  const float* x;        // [N, C]; gated: [N, 3C], b, c and x side by side, and y = c · conv(b · x)
  int64_t x_stride;
  const float* taps;     // [taps, C]
  const float* bias;     // [C] or null
  float* y;              // [N, C]
  int64_t y_stride;
  float* inputs;         // [blocks, room, C]: the input of position p in row p % room
  int32_t channels;
  int32_t count;         // of taps
  int32_t room;
  int32_t gated;
  int32_t silu;          // y = silu(conv)
  int32_t group;
} HrConv;

typedef struct {         // the gated delta rule, or a selective state space: of each head a matrix
  const float* mixed;    // [N, ·]: q, k, v; or x, B, C
  int64_t mixed_stride;
  const float* z;        // [N, H · V]
  int64_t z_stride;
  const float* b;        // [N, H]; null: a state space
  int64_t b_stride;
  const float* a;        // [N, H]; dt
  int64_t a_stride;
  const float* decay;    // [H]
  const float* step;     // [H]
  const float* skip;     // [H]; null: the delta rule
  const float* gain;     // [V] of the delta rule's norm; a state space has its norm behind
  float* y;              // [N, H · V]
  int64_t y_stride;
  float* state;          // [blocks, H, K · V]: of a head runs of 32 columns, [K, 32] each
  float* tail;           // [blocks, drafts, H, K + V + 2]
  int32_t key_heads;
  int32_t heads;
  int32_t key_size;      // K, V: multiples of sixteen
  int32_t value_size;
  int32_t drafts;
  int32_t group;
  float eps;
  int32_t tiled;         // heads take key heads in turn; else each has a run of heads
} HrRecurrence;

typedef struct {         // y = x · act(gate)
  const float* x;
  int64_t x_stride;
  const float* gate;
  int64_t gate_stride;
  float* y;              // null: not wanted in fp32
  int64_t y_stride;
  HrQuantised q;
  int32_t size;
  int32_t activation;
  int32_t rows;
  int32_t unused;
} HrMultiply;

typedef struct {
  const float* up;       // [slots, R, out]: B of every slot, transposed
  int32_t out;
  int32_t first;         // the first column of y that is of this part
} HrLoraPart;

typedef struct {         // LORA_DOWN: inner = A · x, LORA_UP: y += B · inner, by HrStep.adapters
  const float* x;        // [rows, in]
  int64_t x_stride;
  float* inner;          // [rows, parts · R]
  int64_t inner_stride;
  float* y;
  int64_t y_stride;
  const float* down;     // [slots, parts · R, in]
  const int32_t* ranks;  // [slots]: rank of the slot's adapter here, at most R; 0: none
  const HrLoraPart* parts;
  int32_t count;
  int32_t room;          // R
  int64_t in;
  int32_t rows;          // HR_ROWS_R: row r is token sample_rows[r]
  int32_t unused;
} HrLora;

typedef struct {
  float temperature;     // above 0
  float min_p;           // 0: off
  float top_p;           // 1: off
  int32_t top_k;         // 0: off
  double uniform;        // in [0, 1)
} HrDrawRow;

typedef struct {         // one token per row of logits
  const float* logits;   // [count, vocab]
  int64_t stride;
  const HrDrawRow* rows;
  int64_t* tokens;       // [count]: −1 where the candidates had no room
  int64_t vocab;
  int64_t count;
} HrDraw;

typedef struct {
  float temperature;     // 0: the most likely token, and nothing else counts
  float min_p;           // as in HrDrawRow
  float top_p;
  int32_t top_k;
  uint64_t stream;       // of the row's random numbers: see kernels/sampling.py
} HrRule;

typedef struct {         // a step's logits to tokens: one for each of its R rows
  const float* logits;   // [R, vocab]
  int64_t stride;
  const HrRule* rules;   // [R]
  int64_t* tokens;       // [R]: −1 where the candidates had no room
  int64_t vocab;
} HrSample;

#define HR_MOST_RANKS 64

typedef struct {         // a value of which each rank has columns, for ranks that share no memory
  uint8_t* data;
  int64_t stride;        // bytes from a row to the next
  const int64_t* bounds; // [ranks + 1]: rank r has a row's bytes from bounds[r] to bounds[r + 1]
  const HrSpan* spans;  // rows of a mixture, up to where its list ends; null: by `rows`
  const int32_t* owners; // or null; by expert: a rank has, of all columns, the rows of its own
  int32_t rows;          // HrRows; -1: one
  int32_t together;      // rows that are one: six of codes
} HrPiece;

typedef struct {         // what ranks have written side by side is there for all behind it: ranks.h
  void* fence;
  const HrPiece* pieces; // what is sent where ranks share no memory
  int32_t ranks;
  int32_t place;         // which of the program's exchanges this is
  int32_t count;         // of pieces
  int32_t unused;
} HrExchange;

typedef struct {         // rows [N, width] that one stage makes and the next one reads: handover.h
  void* fence;
  void* link;            // memory of both; null: by the fence's wire
  float* data;
  int64_t stride;
  int32_t width;
  int32_t peer;          // the rank that has the other stage
  int32_t gives;         // 1: to the peer; 0: from it
  int32_t most;          // rows of a slot
} HrHandover;

typedef struct {         // of the most likely tokens that ranks have found, the most likely one
  const HrBest* best;    // [ranks, stride]
  int64_t stride;
  int64_t* tokens;       // [R]
  int32_t ranks;
  int32_t unused;
} HrAgree;

typedef struct {
  int32_t code;
  int32_t unused;
  const void* op;
} HrRecord;

#define HR_MAX_GROUPS 16

typedef struct {
  const int32_t* tables;   // [B, table_stride]
  const int64_t* slots;    // [N]
  int64_t table_stride;
  int64_t window;          // latest tokens that a query sees, itself included; 0: all
} HrGroup;

typedef struct {
  int32_t n, b, r, group_count;
  const int64_t* tokens;        // [N]
  const int64_t* positions;     // [N]
  const int64_t* reach;         // [N]: the last position that each token sees; no one sees less than
                                // the one before it in its entry
  const int32_t* query_starts;  // [B + 1]
  const int32_t* lengths;       // [B]
  const int64_t* sample_rows;   // [R], ascending
  HrGroup groups[HR_MAX_GROUPS];
  const int32_t* adapters;      // [N]: LoRA slot of each token, −1: none; null: none at all
  const int64_t* types;         // [N]: token type of each token; null where no table is read by it
  const int32_t* states;        // [B, HR_STATE_COLUMNS]; null: no drafts, nothing kept
  const int64_t* turns;         // [axes, N]: positions that ropes turn by; null: `positions`
  const int32_t* windows;       // [window_count + 1]: bounds of windows; null where none is read
  int64_t window_count;
  const void* across;           // HrStep: the same tokens as they see inputs; null: none reads any
  const float* numbers;         // [N, ·]: dense features of each row of a ranking; null: no ranking
  const HrBag* bags;            // by feature of a ranking; null: no ranking
  const int64_t* labels;        // [R]: class of each picture; null: no pictures
  const float* times;           // [R, ·]: features of the time step of each picture; null: as labels
  const float* texts;           // [T, ·]: rows of the pictures' texts; null: none are read
  const int32_t* text_starts;   // [B + 1]
  int64_t t;
} HrStep;

typedef struct HrTeam HrTeam;

#ifdef __cplusplus
}
#endif
