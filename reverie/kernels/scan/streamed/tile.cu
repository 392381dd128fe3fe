// Loads, matrix products and norms of the streamed scan, which runs five kernels per time
// step in the forward and in the backward pass.
//
// A thread block computes a tile of a few columns of one layer for all rows, 16 rows at a
// time. Its eight warps share the inputs: a warp takes every eighth window of 32 inputs.
// Weights are laid out so that a thread's part of a window is one 16-byte load. The first
// weights are loaded before the block waits for the previous kernel, so that they arrive
// while that kernel still runs. Other values are also loaded long before they are used,
// because latency dominates the time of a step.
//
// Activations are (time, row, width); inputs and incoming gradients are (row, time,
// width). A norm needs a sum over the whole row: a block that writes a tile also writes
// the tile's partial sum, (row, tile), and a block that reads the row adds up the partial
// sums, always in the same order.

constexpr int WARPS = 8, THREADS = 256;
constexpr int WIDTH = DETER / GRU_BLOCKS, LOGITS = STOCH * CLASSES;
// width of the input that all blocks of `hid` share: outputs of in0 and in1, action
constexpr int SHARED_INPUT = 3 * UNITS;
constexpr int TWO_UNITS = 2 * UNITS;
constexpr int HID_INPUTS = WIDTH + TWO_UNITS;  // inputs of `hid` without the action
constexpr int BLOCK_TILES = DETER / BLOCK_COLUMNS, UNIT_TILES = UNITS / UNIT_COLUMNS;
constexpr int IN1_TILES = UNITS / IN1_COLUMNS;
constexpr float FLOAT_MAX = 3.4e38f;

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
// A loop over groups of 16 rows; `first` is the first row of the group.
#define EACH_16_ROWS for (int first = 0; first < p.batch; first += 16)

// ---- loads and stores

DEVICE uint4 load_weights4(const bf16* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
// Loads bypass the L1 cache, which does not see what the previous kernel has written.
DEFINE_LOADS(load_l2_, "ld.global.cg")
DEVICE float load_float(const float* p) { return __uint_as_float(load_l2_1(p)); }
DEVICE float2 load_two(const float* p) {
  return make_float2(load_float(p), load_float(p + 1));
}
DEVICE float2 load_two(const bf16* p) {
  u32 w = load_l2_1(p);
  return make_float2(low(w), high(w));
}
DEVICE void store_two(bf16* p, float2 v) { *(u32*)p = pack(v.x, v.y); }

// Programmatic dependent launch: the next kernel of the stream may start, and load its
// weights, before this one ends. It then waits for the results of this kernel.
DEVICE void allow_next_kernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
DEVICE void wait_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- pairs of numbers

DEVICE float2 zero2() { return make_float2(0, 0); }
DEVICE float2 add(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
DEVICE float dot(float2 a, float2 b) { return a.x * b.x + a.y * b.y; }
DEVICE float2 rounded(float2 v) {
  u32 w = pack(v.x, v.y);
  return make_float2(low(w), high(w));
}

// ---- products

// Position of a thread's two adjacent outputs in a tile with N columns. The thread adds up
// the sums of all warps for them.
template <int N>
struct Output {
  static constexpr int LANES = N / 2;  // threads per row
  const int row = threadIdx.x / LANES, column = threadIdx.x % LANES * 2;
  const bool is_used = row < 16;  // other threads have no output
  const bool exists;              // false for rows beyond the batch
  const int batch_row;            // a valid row even if this one does not exist
  DEVICE Output(int first, int batch)
      : exists(row < 16 && first + row < batch), batch_row(min(first + row, batch - 1)) {}
};

// The matrix product of N columns of a layer with K inputs. NT is the number of groups of
// 8 columns, the width of a product instruction. `window(i)` returns the first input of
// this thread in window i of its warp, and `has(i)` is false if there is no such window.
template <int N, int K>
struct Tile {
  static constexpr int NT = N / 8, WINDOWS = K / 32;
  static constexpr int WARP_WINDOWS = (WINDOWS + WARPS - 1) / WARPS;
  static constexpr int PITCH = N + (24 - N % 16) % 16;  // avoids bank conflicts
  // numbers of windows of weights and inputs that are prefetched into registers
  static constexpr int WEIGHT_WINDOWS = WARP_WINDOWS * NT <= WEIGHT_LOADS ? WARP_WINDOWS
                                        : WEIGHT_LOADS > NT ? WEIGHT_LOADS / NT
                                                            : 1;
  static constexpr int INPUT_WINDOWS = WARP_WINDOWS < 4 ? WARP_WINDOWS : 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // `upper` is a row of the inputs (the other row is upper + 8), and also a column in
  // each group of 8 columns of the weights. `quad` selects 8 of the 32 inputs of a window.
  const int upper = lane / 4, quad = lane % 4;
  uint4 weights[WEIGHT_WINDOWS][NT];

  DEVICE int window(int i) const { return (i * WARPS + warp) * 32 + 8 * quad; }
  DEVICE bool has(int i) const {
    return i < WARP_WINDOWS && (WINDOWS % WARPS == 0 || i * WARPS + warp < WINDOWS);
  }

  // `weight(n, k)` is the address of the weights of column n from input k on.
  template <class Weight>
  DEVICE void load(Weight weight) {
    UNROLL for (int i = 0; i < WEIGHT_WINDOWS; i++)
      UNROLL for (int n = 0; n < NT; n++)
        weights[i][n] = has(i) ? load_weights4(weight(8 * n + upper, window(i)))
                               : make_uint4(0, 0, 0, 0);
  }
  // Loads the first weights while the previous kernel still runs.
  template <class Weight>
  DEVICE void start(Weight weight, bool is_needed = true) {
    allow_next_kernel();
    if (is_needed) load(weight);
    wait_previous_kernel();
  }
  // Multiplies 16 rows and stores the sums of each warp in `sums`. `fetch(k)` starts to
  // load inputs k..k+7 of this thread's two rows, `convert(k, x)` converts them to a
  // fragment; `prepare` is called after the first fetches. `reload` loads the first
  // weights again, for the second and later groups of 16 rows.
  template <class Weight, class Fetch, class Prepare, class Convert>
  DEVICE void multiply_rows(float* sums, bool reload, Weight weight, Fetch fetch,
                            Prepare prepare, Convert convert) {
    decltype(fetch(0)) inputs[INPUT_WINDOWS];
    UNROLL for (int i = 0; i < INPUT_WINDOWS; i++)
      if (has(i)) inputs[i] = fetch(window(i));
    if (WEIGHT_WINDOWS < WARP_WINDOWS && reload) load(weight);
    prepare();
    float c[NT][4] = {};
    UNROLL for (int i = 0; i < WARP_WINDOWS; i++) {
      if (!has(i)) continue;
      Fragment a = convert(window(i), inputs[i % INPUT_WINDOWS]);
      if (has(i + INPUT_WINDOWS))
        inputs[i % INPUT_WINDOWS] = fetch(window(i + INPUT_WINDOWS));
      UNROLL for (int n = 0; n < NT; n++) {
        uint4 v = weights[i % WEIGHT_WINDOWS][n];
        if (has(i + WEIGHT_WINDOWS))
          weights[i % WEIGHT_WINDOWS][n] =
              load_weights4(weight(8 * n + upper, window(i + WEIGHT_WINDOWS)));
        u32 b0[2] = {v.x, v.y}, b1[2] = {v.z, v.w};
        multiply(c[n], a, 0, b0);
        multiply(c[n], a, 1, b1);
      }
    }
    float* top = sums + (warp * 16 + upper) * PITCH + 2 * quad;
    UNROLL for (int n = 0; n < NT; n++) {
      *(float2*)(top + 8 * n) = make_float2(c[n][0], c[n][1]);
      *(float2*)(top + 8 * PITCH + 8 * n) = make_float2(c[n][2], c[n][3]);
    }
    __syncthreads();
  }
  template <class Weight, class Fetch>
  DEVICE void multiply_rows(float* sums, bool reload, Weight weight, Fetch fetch) {
    multiply_rows(
        sums, reload, weight, fetch, [] {}, [](int, Fragment x) { return x; });
  }
  // Adds up the sums of all warps.
  static DEVICE float2 total(const float* sums, int row, int column) {
    float2 sum = zero2();
    UNROLL for (int m = 0; m < WARPS; m++)
      sum = add(sum, *(const float2*)(sums + (m * 16 + row) * PITCH + column));
    return sum;
  }
};

// The two rows of a thread's fragments; a row beyond the batch is replaced by its last row.
struct RowPair {
  int upper, lower;
  DEVICE RowPair(int first, int batch) {
    upper = min(first + threadIdx.x % 32 / 4, batch - 1);
    lower = min(first + threadIdx.x % 32 / 4 + 8, batch - 1);
  }
  DEVICE Fragment load(const bf16* p, int width, int k) const {
    return fragment(load_l2_4(p + upper * width + k), load_l2_4(p + lower * width + k));
  }
  DEVICE float2 load(const float* p, int width) const {
    return make_float2(load_float(p + upper * width), load_float(p + lower * width));
  }
  // Stores a fragment, without rows beyond the batch.
  DEVICE void store(bf16* p, int width, int first, int batch, const Fragment& x) const {
    const int row = first + threadIdx.x % 32 / 4;
    if (row < batch) store_upper(p + upper * width, x);
    if (row + 8 < batch) store_lower(p + lower * width, x);
  }
};
// Returns the values of both rows of a thread's fragments, given those of all 16 rows.
DEVICE float2 of_row_pair(const float* values) {
  const int upper = threadIdx.x % 32 / 4;
  return make_float2(values[upper], values[upper + 8]);
}

// ---- norms

// Sums of 16 rows, each from COUNT partial sums; a warp handles two rows.
template <int COUNT>
struct RowSums {
  float part[2] = {};
  DEVICE RowSums(const float* partials, int first, int batch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    UNROLL for (int r = 0; r < 2; r++) {
      const int row = first + warp + r * WARPS;
      if (row < batch)
        UNROLL for (int i = 0; i < COUNT; i += 32)
          if (i + lane < COUNT) part[r] += load_float(partials + row * COUNT + i + lane);
    }
  }
  template <class Convert>
  DEVICE void store(float* values, Convert convert) const {
    UNROLL for (int r = 0; r < 2; r++) {
      float total = lane_sum<32>(part[r]);
      if (threadIdx.x % 32 == 0) values[threadIdx.x / 32 + r * WARPS] = convert(total);
    }
  }
  // Reciprocal root mean squares of rows of F numbers, from sums of squares.
  template <int F>
  DEVICE void store_inv_rms(float* values, float eps) const {
    store(values, [&](float x) { return rsqrtf(x * (1.f / F) + eps); });
  }
  template <int F>
  DEVICE void store_mean(float* values) const {
    store(values, [](float x) { return x * (1.f / F); });
  }
};

DEVICE void load_scales8(float* out, const float* p) {
  float4 a = *(const float4*)p, b = *(const float4*)(p + 4);
  out[0] = a.x;
  out[1] = a.y;
  out[2] = a.z;
  out[3] = a.w;
  out[4] = b.x;
  out[5] = b.y;
  out[6] = b.z;
  out[7] = b.w;
}
DEVICE Fragment norm_act(Fragment x, const float* scale, float2 inv_rms) {
  float gain[8];
  load_scales8(gain, scale);
  norm_silu(x.w, inv_rms.x, gain);
  norm_silu(x.w + 4, inv_rms.y, gain);
  return x;
}

// ---- sampling

// The classes of one categorical variable are divided among the 16 lanes of a row: each
// lane has every sixteenth pair of classes. Calls `use(i, label)` for every pair of this
// lane; `label` is the first class of the pair.
constexpr int PAIRS = (CLASSES / 2 + 15) / 16;
template <class Use>
DEVICE void each_class_pair(Use use) {
  UNROLL for (int i = 0; i < PAIRS; i++) {
    const int label = (i * 16 + threadIdx.x % 16) * 2;
    if (label < CLASSES) use(i, label);
  }
}
// Replaces logits by exp(logit - maximum) and returns the sum over this lane's classes.
DEVICE float exponentiate(float2* logits) {
  float maximum = -FLOAT_MAX, total = 0;
  each_class_pair([&](int i, int) {
    maximum = fmaxf(maximum, fmaxf(logits[i].x, logits[i].y));
  });
  UNROLL for (int m = 1; m < 16; m <<= 1)
    maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, m));
  each_class_pair([&](int i, int) {
    logits[i] =
        make_float2(__expf(logits[i].x - maximum), __expf(logits[i].y - maximum));
    total += logits[i].x + logits[i].y;
  });
  return total;
}
