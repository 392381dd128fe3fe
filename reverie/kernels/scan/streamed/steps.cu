// One step of the posterior scan as five kernels forth and five back, for any size.
//
// A block of threads computes a few columns of one layer for all rows, 16 at a time. Its
// eight warps share the inputs: a warp takes every eighth window of 32. Weights are laid
// out so that a thread's share of a window is one 16-byte load; the first of them are
// loaded before the block waits for the kernel before it, so that they stream in while
// that one still works. Everything else a block reads is asked for as soon as it may be,
// long before it is used: what a step costs is mostly waiting.
//
// Tensors are (time, row, width); what comes from outside is (row, time, width). A norm
// needs a sum over the whole row: whoever writes a tile also writes the tile's share of
// that sum, and whoever reads the row adds up the shares, always in the same order.

constexpr int WARPS = 8, THREADS = 256;
constexpr int WIDTH = DETER / GROUPS, LOGITS = CHOICES * CLASSES;
constexpr int SHARED = 3 * UNITS, BOTH = 2 * UNITS, FEED = WIDTH + BOTH;
constexpr float MOST = 3.4e38f;
constexpr int NARROW = 8;  // columns of a tile of the layers around the core
constexpr int CORE_TILES = DETER / CORE, UNIT_TILES = UNITS / NARROW;
constexpr int PARTS = UNITS / PART;  // of a row, where weights are picked by choices

struct Step {
  // weights: one row per output, inputs side by side
  const u16 *hid, *gru, *both, *logit, *in1;
  const u16 *in0_bias, *in1_bias, *gru_bias, *logit_bias;
  const float *in0_scale, *in1_scale, *hid_scale, *obs_scale;
  // from outside
  const u16 *hoisted, *tokens;
  const float* clocks;
  const u8* reset;
  // the tape
  u16 *deters, *stochs, *logits, *deter, *stoch, *pre0, *pre1, *prehid, *gates, *preobs;
  float* inverse;
  u16 *shared, *hidden, *seen;
  // between kernels: shares of the norms (row, tile), and the choices
  float *shares0, *shares1, *shares2, *shares3;
  int* choices;
  int t, length, batch;
  float eps, unimix;
};

struct Back {
  // weights: one row per output, inputs side by side; `hid` as it is
  const u16 *in1, *logit, *both, *gru, *hid;
  const float *in0_scale, *in1_scale, *hid_scale, *obs_scale;
  // from outside
  const u16 *from_deters, *from_stochs, *from_logits;
  const u8* reset;
  // the tape
  const u16 *logits, *deter, *pre0, *pre1, *prehid, *gates, *preobs;
  const float* inverse;
  // gradients, those of the layers behind their norms
  u16 *to_logits, *to_gates, *to_obs, *to_hid, *to_in;
  float* carry;
  // between kernels
  float *shares0, *shares1, *shares2, *shares3;
  int t, length, batch;
  float unimix;
};

// ---- loads

DEVICE uint4 weights4(const u16* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
DEVICE uint4 fresh4(const u16* p) {  // what another kernel has just written
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEVICE u32 fresh1(const void* p) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE float fresh(const float* p) { return __uint_as_float(fresh1(p)); }
DEVICE float2 two(const u16* p) {
  u32 w = fresh1(p);
  return make_float2(low(w), high(w));
}
DEVICE void keep(u16* p, float2 v) { *(u32*)p = pack(v.x, v.y); }
DEVICE float2 rounded(float2 v) {
  u32 w = pack(v.x, v.y);
  return make_float2(low(w), high(w));
}

DEVICE void let_next_come() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
DEVICE void await_last() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- a tile: N columns of a layer with K inputs

template <int N, int K>
struct Tile {
  static constexpr int NT = N / 8, WINDOWS = K / 32,
                       MINE = (WINDOWS + WARPS - 1) / WARPS;
  static constexpr int PITCH = N + (24 - N % 16) % 16;  // spreads rows over the banks
  // windows of weights and of inputs that are under way at once, in registers
  static constexpr int HELD = MINE * NT <= HOLD ? MINE : HOLD > NT ? HOLD / NT : 1;
  static constexpr int AHEAD = MINE < 4 ? MINE : 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int upper = lane / 4, quad = lane % 4;
  uint4 held[HELD][NT];

  DEVICE int window(int i) const { return (i * WARPS + warp) * 32 + 8 * quad; }
  DEVICE bool has(int i) const {
    return i < MINE && (WINDOWS % WARPS == 0 || i * WARPS + warp < WINDOWS);
  }

  // `line(n, k)`: where the weights of column n begin at input k
  template <class Line>
  DEVICE void load(Line line) {
    UNROLL for (int i = 0; i < HELD; i++)
      UNROLL for (int n = 0; n < NT; n++)
        held[i][n] =
            has(i) ? weights4(line(8 * n + upper, window(i))) : make_uint4(0, 0, 0, 0);
  }
  // `fetch(k)` asks for inputs k..k+7 of this thread's two rows, `finish(k, x)` makes
  // their fragment of them; `prepare` comes between the first of both.
  template <class Line, class Fetch, class Prepare, class Finish>
  DEVICE void multiply_rows(float* sums, bool again, Line line, Fetch fetch,
                            Prepare prepare, Finish finish) {
    decltype(fetch(0)) inputs[AHEAD];
    UNROLL for (int i = 0; i < AHEAD; i++)
      if (has(i)) inputs[i] = fetch(window(i));
    if (HELD < MINE && again) load(line);
    prepare();
    float c[NT][4] = {};
    UNROLL for (int i = 0; i < MINE; i++) {
      if (!has(i)) continue;
      Fragment a = finish(window(i), inputs[i % AHEAD]);
      if (has(i + AHEAD)) inputs[i % AHEAD] = fetch(window(i + AHEAD));
      UNROLL for (int n = 0; n < NT; n++) {
        uint4 v = held[i % HELD][n];
        if (has(i + HELD))
          held[i % HELD][n] = weights4(line(8 * n + upper, window(i + HELD)));
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
  static DEVICE float2 collect(const float* sums, int row, int column) {
    float2 total = make_float2(0, 0);
    UNROLL for (int m = 0; m < WARPS; m++) {
      float2 v = *(const float2*)(sums + (m * 16 + row) * PITCH + column);
      total.x += v.x;
      total.y += v.y;
    }
    return total;
  }
};

// Sums over 16 rows from their shares, (row, COUNT); one warp has two of the rows.
template <int COUNT>
struct Shares {
  float part[2] = {};
  DEVICE Shares(const float* shares, int first, int batch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    UNROLL for (int r = 0; r < 2; r++) {
      const int row = first + warp + r * WARPS;
      if (row < batch)
        UNROLL for (int i = 0; i < COUNT; i += 32)
          if (i + lane < COUNT) part[r] += fresh(shares + row * COUNT + i + lane);
    }
  }
  template <class Use>
  DEVICE void settle(float* totals, Use use) const {
    UNROLL for (int r = 0; r < 2; r++) {
      float total = lane_sum<32>(part[r]);
      if (threadIdx.x % 32 == 0) totals[threadIdx.x / 32 + r * WARPS] = use(total);
    }
  }
};

// The two rows of a thread's fragments, as far as they exist.
struct Pair {
  int upper, lower;
  DEVICE Pair(int first, int batch) {
    upper = min(first + threadIdx.x % 32 / 4, batch - 1);
    lower = min(first + threadIdx.x % 32 / 4 + 8, batch - 1);
  }
  DEVICE Fragment load(const u16* p, int width, int k) const {
    return fragment(fresh4(p + upper * width + k), fresh4(p + lower * width + k));
  }
  DEVICE float2 load(const float* p, int width) const {
    return make_float2(fresh(p + upper * width), fresh(p + lower * width));
  }
};
// Store a fragment of both rows, where they exist.
DEVICE void keep_rows(u16* p, const Pair& rows, int width, int first, int batch,
                      const Fragment& x) {
  const int up = first + threadIdx.x % 32 / 4;
  if (up < batch)
    *(uint4*)(p + rows.upper * width) = make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]);
  if (up + 8 < batch)
    *(uint4*)(p + rows.lower * width) = make_uint4(x.w[4], x.w[5], x.w[6], x.w[7]);
}
DEVICE void scales8(float* out, const float* p) {
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
DEVICE Fragment activated(Fragment x, const float* scale, float upper, float lower) {
  float gain[8];
  scales8(gain, scale);
  norm_silu(x.w, upper, gain);
  norm_silu(x.w + 4, lower, gain);
  return x;
}
// The gradient before a norm, from that behind it.
struct Slope {
  Fragment grad, x;
};
DEVICE Fragment sloped(Slope s, const float* scale, float2 inverse, float2 mean) {
  Fragment grad = s.grad, x = s.x;
  float gain[8];
  scales8(gain, scale);
  UNROLL for (int i = 0; i < 4; i++) {
    float a = mean.x * inverse.x, b = mean.y * inverse.y;
    grad.w[i] =
        pack(inverse.x * (low(grad.w[i]) * gain[2 * i] - low(x.w[i]) * a),
             inverse.x * (high(grad.w[i]) * gain[2 * i + 1] - high(x.w[i]) * a));
    grad.w[4 + i] = pack(
        inverse.y * (low(grad.w[4 + i]) * gain[2 * i] - low(x.w[4 + i]) * b),
        inverse.y * (high(grad.w[4 + i]) * gain[2 * i + 1] - high(x.w[4 + i]) * b));
  }
  return grad;
}
DEVICE float dot(float2 a, float2 b) { return a.x * b.x + a.y * b.y; }

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
#define EACH_ROWS for (int first = 0; first < p.batch; first += 16)
DEVICE float2 none() { return make_float2(0, 0); }

// ---- forth

KERNEL step_hidden(Step p) {
  extern __shared__ __align__(16) float sums[];
  __shared__ float totals[2][16];
  const int tid = threadIdx.x, t = p.t, tile = blockIdx.x;
  const int column = tile * CORE, group = column / WIDTH, base = t * p.batch;
  Tile<CORE, FEED> product;
  auto line = [&](int n, int k) { return p.hid + (column + n) * FEED + k; };
  let_next_come();
  product.load(line);
  await_last();
  EACH_ROWS {
    constexpr int LANES = CORE / 2;
    const int row = tid / LANES, at = column + tid % LANES * 2, up = product.upper;
    const bool exists = row < 16 && first + row < p.batch;
    const Pair rows(first, p.batch);
    const Shares<UNIT_TILES> shares0(p.shares0, first, p.batch);
    const Shares<PARTS> shares1(p.shares1, first, p.batch);
    float2 h = none();
    if (exists) h = two(p.hoisted + ((first + row) * p.length + t) * DETER + at);
    product.multiply_rows(
        sums, first > 0, line,
        [&](int k) {
          if (k < WIDTH)
            return rows.load(p.deter + base * DETER + group * WIDTH, DETER, k);
          const bool second = k >= WIDTH + UNITS;
          k -= second ? WIDTH + UNITS : WIDTH;
          return rows.load((second ? p.pre1 : p.pre0) + base * UNITS, UNITS, k);
        },
        [&] {
          auto use = [&](float x) { return rsqrtf(x * (1.f / UNITS) + p.eps); };
          shares0.settle(totals[0], use);
          shares1.settle(totals[1], use);
          __syncthreads();
        },
        [&](int k, Fragment x) {
          if (k < WIDTH) return x;
          const bool second = k >= WIDTH + UNITS;
          k -= second ? WIDTH + UNITS : WIDTH;
          x = activated(x, (second ? p.in1_scale : p.in0_scale) + k, totals[second][up],
                        totals[second][up + 8]);
          if (tile == 0)
            keep_rows(p.shared + base * SHARED + second * UNITS + k, rows, SHARED,
                      first, p.batch, x);
          return x;
        });
    if (row < 16) {
      float2 x = product.collect(sums, row, tid % LANES * 2);
      x = rounded(make_float2(x.x + h.x, x.y + h.y));
      if (exists) keep(p.prehid + (base + first + row) * DETER + at, x);
      float squares = lane_sum<LANES>(dot(x, x));
      if (exists && tid % LANES == 0)
        p.shares2[(first + row) * CORE_TILES + tile] = squares;
    }
    if (tile == 0 && tid < 16 && first + tid < p.batch) {
      p.inverse[(base + first + tid) * 4] = totals[0][tid];
      p.inverse[(base + first + tid) * 4 + 1] = totals[1][tid];
    }
    __syncthreads();
  }
}

KERNEL step_gates(Step p) {
  extern __shared__ __align__(16) float sums[];
  __shared__ float totals[16];
  const int tid = threadIdx.x, t = p.t, tile = blockIdx.x, base = t * p.batch;
  const int column = tile * CORE, group = column / WIDTH, inside = column % WIDTH;
  Tile<3 * CORE, WIDTH> product;
  auto line = [&](int n, int k) {
    return p.gru + (group * 3 * WIDTH + n / CORE * WIDTH + inside + n % CORE) * WIDTH +
           k;
  };
  let_next_come();
  product.load(line);
  await_last();
  EACH_ROWS {
    constexpr int LANES = CORE / 2;
    const int row = tid / LANES, off = tid % LANES * 2, at = column + off;
    const int here = base + first + row, up = product.upper;
    const int gate = group * 3 * WIDTH + inside + off;
    const bool exists = row < 16 && first + row < p.batch;
    const bool more = exists && t + 1 < p.length;
    const Pair rows(first, p.batch);
    const Shares<CORE_TILES> shares(p.shares2, first, p.batch);
    float2 value[3] = {}, before = none();
    if (exists) {
      UNROLL for (int m = 0; m < 3; m++) value[m] = two(p.gru_bias + gate + m * WIDTH);
      before = two(p.deter + here * DETER + at);
    }
    const bool forget = more && p.reset[(first + row) * p.length + t + 1];
    product.multiply_rows(
        sums, first > 0, line,
        [&](int k) {
          return rows.load(p.prehid + base * DETER, DETER, group * WIDTH + k);
        },
        [&] {
          shares.settle(totals,
                        [&](float x) { return rsqrtf(x * (1.f / DETER) + p.eps); });
          __syncthreads();
        },
        [&](int k, Fragment x) {
          k += group * WIDTH;
          x = activated(x, p.hid_scale + k, totals[up], totals[up + 8]);
          if (inside == 0)
            keep_rows(p.hidden + base * DETER + k, rows, DETER, first, p.batch, x);
          return x;
        });
    if (exists) {
      UNROLL for (int m = 0; m < 3; m++) {
        float2 x = product.collect(sums, row, m * CORE + off);
        value[m] = rounded(make_float2(x.x + value[m].x, x.y + value[m].y));
        keep(p.gates + here * (3 * DETER) + gate + m * WIDTH, value[m]);
      }
      float a = sigmoid(value[2].x - 1.f), b = sigmoid(value[2].y - 1.f);
      float2 deter = rounded(make_float2(
          a * tanh_(sigmoid(value[0].x) * value[1].x) + (1.f - a) * before.x,
          b * tanh_(sigmoid(value[0].y) * value[1].y) + (1.f - b) * before.y));
      keep(p.deters + here * DETER + at, deter);
      if (more) keep(p.deter + (here + p.batch) * DETER + at, forget ? none() : deter);
    }
    if (tile == 0 && tid < 16 && first + tid < p.batch)
      p.inverse[(base + first + tid) * 4 + 2] = totals[tid];
    __syncthreads();
  }
}

KERNEL step_inputs(Step p) {
  extern __shared__ __align__(16) float sums[];
  const int tid = threadIdx.x, t = p.t, base = t * p.batch;
  const int unit = blockIdx.x * NARROW;
  const bool is_obs = unit >= UNITS;
  Tile<NARROW, DETER> product;
  auto line = [&](int n, int k) { return p.both + (unit + n) * DETER + k; };
  let_next_come();
  product.load(line);
  await_last();
  EACH_ROWS {
    constexpr int LANES = NARROW / 2;
    const int row = tid / LANES, off = tid % LANES * 2, at = unit % UNITS + off;
    const int given = (first + row) * p.length + t, here = base + first + row;
    const bool exists = row < 16 && first + row < p.batch;
    const bool more = exists && !is_obs && t + 1 < p.length;
    const bool forget = more && p.reset[given + 1];
    const Pair rows(first, p.batch);
    float2 plus = none();
    if (exists) plus = two(is_obs ? p.tokens + given * UNITS + at : p.in0_bias + at);
    product.multiply_rows(
        sums, first > 0, line,
        [&](int k) { return rows.load(p.deters + base * DETER, DETER, k); }, [] {},
        [](int, Fragment x) { return x; });
    if (row < 16) {
      float2 x = product.collect(sums, row, off);
      if (forget) x = none();
      x = rounded(make_float2(x.x + plus.x, x.y + plus.y));
      if (exists && is_obs) keep(p.preobs + here * UNITS + at, x);
      if (more) keep(p.pre0 + (here + p.batch) * UNITS + at, x);
      float squares = lane_sum<LANES>(dot(x, x));
      if (exists && tid % LANES == 0)
        (is_obs ? p.shares3 : p.shares0)[(first + row) * UNIT_TILES + at / NARROW] =
            squares;
    }
    __syncthreads();
  }
}

KERNEL step_posterior(Step p) {
  extern __shared__ __align__(16) float sums[];
  __shared__ float totals[16];
  const int tid = threadIdx.x, t = p.t, choice = blockIdx.x, base = t * p.batch;
  Tile<CLASSES, UNITS> product;
  auto line = [&](int n, int k) {
    return p.logit + (choice * CLASSES + n) * UNITS + k;
  };
  let_next_come();
  product.load(line);
  await_last();
  EACH_ROWS {
    // 16 lanes a row, each with every sixteenth pair of classes
    constexpr int PAIRS = (CLASSES / 2 + 15) / 16;
    const int row = tid / 16, lane = tid % 16, up = product.upper;
    const int own = min(first + row, p.batch - 1);
    const bool exists = first + row < p.batch, more = t + 1 < p.length;
    const int here = (base + own) * LOGITS + choice * CLASSES;
    const float* clocks = p.clocks + (own * p.length + t) * LOGITS + choice * CLASSES;
    const Pair rows(first, p.batch);
    const Shares<UNIT_TILES> shares(p.shares3, first, p.batch);
    float2 logit[PAIRS], clock[PAIRS];
    UNROLL for (int i = 0; i < PAIRS; i++) {
      const int label = (i * 16 + lane) * 2;
      if (label >= CLASSES) continue;
      logit[i] = two(p.logit_bias + choice * CLASSES + label);
      clock[i] = make_float2(fresh(clocks + label), fresh(clocks + label + 1));
    }
    const bool forget = more && p.reset[own * p.length + t + 1];
    product.multiply_rows(
        sums, first > 0, line,
        [&](int k) { return rows.load(p.preobs + base * UNITS, UNITS, k); },
        [&] {
          shares.settle(totals,
                        [&](float x) { return rsqrtf(x * (1.f / UNITS) + p.eps); });
          __syncthreads();
        },
        [&](int k, Fragment x) {
          x = activated(x, p.obs_scale + k, totals[up], totals[up + 8]);
          if (choice == 0)
            keep_rows(p.seen + base * UNITS + k, rows, UNITS, first, p.batch, x);
          return x;
        });
    float top = -MOST, total = 0;
    UNROLL for (int i = 0; i < PAIRS; i++) {
      const int label = (i * 16 + lane) * 2;
      if (label >= CLASSES) continue;
      float2 x = product.collect(sums, row, label);
      logit[i] = rounded(make_float2(x.x + logit[i].x, x.y + logit[i].y));
      if (exists) keep(p.logits + here + label, logit[i]);
      top = fmaxf(top, fmaxf(logit[i].x, logit[i].y));
    }
    UNROLL for (int m = 1; m < 16; m <<= 1)
      top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
    UNROLL for (int i = 0; i < PAIRS; i++) {
      if ((i * 16 + lane) * 2 >= CLASSES) continue;
      logit[i] = make_float2(__expf(logit[i].x - top), __expf(logit[i].y - top));
      total += logit[i].x + logit[i].y;
    }
    total = (1.f - p.unimix) / lane_sum<16>(total);
    float best = -1.f;
    int which = 0;
    UNROLL for (int i = 0; i < PAIRS; i++) {
      const int label = (i * 16 + lane) * 2;
      if (label >= CLASSES) continue;
      float a = __fdividef(logit[i].x * total + p.unimix / CLASSES, clock[i].x);
      float b = __fdividef(logit[i].y * total + p.unimix / CLASSES, clock[i].y);
      if (a > best) best = a, which = label;
      if (b > best) best = b, which = label + 1;
    }
    UNROLL for (int m = 1; m < 16; m <<= 1) {  // ties go to the lower class
      float other = __shfl_xor_sync(~0u, best, m);
      int theirs = __shfl_xor_sync(~0u, which, m);
      if (other > best || (other == best && theirs < which))
        best = other, which = theirs;
    }
    if (exists) {
      UNROLL for (int i = 0; i < PAIRS; i++) {
        const int label = (i * 16 + lane) * 2;
        if (label >= CLASSES) continue;
        float2 hot = make_float2(label == which, label + 1 == which);
        keep(p.stochs + here + label, hot);
        if (forget) hot = make_float2(0, 0);
        if (more) keep(p.stoch + here + p.batch * LOGITS + label, hot);
      }
      if (lane == 0) p.choices[own * CHOICES + choice] = which;
    }
    if (choice == 0 && tid < 16 && first + tid < p.batch)
      p.inverse[(base + first + tid) * 4 + 3] = totals[tid];
    __syncthreads();
  }
}

// dynin1 of the next step, a part of one row a block: a weight row per choice, added up
KERNEL step_choices(Step p) {
  __shared__ float2 sums[WARPS][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
  const int at = part * PART + 2 * lane;
  const bool inside = 2 * lane < PART;
  let_next_come();
  await_last();
  const bool forget = p.reset[row * p.length + p.t + 1];
  constexpr int EACH = (CHOICES + WARPS - 1) / WARPS;
  int label[EACH];
  UNROLL for (int i = 0; i < EACH; i++) {
    const int choice = i * WARPS + warp;
    label[i] = -1;
    if (choice < CHOICES && inside)
      label[i] = choice * CLASSES + (int)fresh1(p.choices + row * CHOICES + choice);
  }
  float2 x = none();
  if (warp == 0 && inside) x = two(p.in1_bias + at);
  UNROLL for (int i = 0; i < EACH; i++)
    if (!forget && label[i] >= 0) {
      u32 w = *(const u32*)(p.in1 + label[i] * UNITS + at);
      x.x += low(w);
      x.y += high(w);
    }
  sums[warp][lane] = x;
  __syncthreads();
  if (warp > 0) return;
  x = none();
  UNROLL for (int m = 0; m < WARPS; m++) {
    x.x += sums[m][lane].x;
    x.y += sums[m][lane].y;
  }
  x = rounded(x);
  if (inside) keep(p.pre1 + ((p.t + 1) * p.batch + row) * UNITS + at, x);
  float squares = lane_sum<32>(dot(x, x));
  if (lane == 0) p.shares1[row * PARTS + part] = squares;
}

// ---- back

KERNEL back_choices(Back p) {
  extern __shared__ __align__(16) float sums[];
  __shared__ float totals[16];
  const int tid = threadIdx.x, t = p.t, choice = blockIdx.x;
  const int base = t * p.batch, after = base + p.batch;
  Tile<CLASSES, UNITS> product;
  auto line = [&](int n, int k) { return p.in1 + (choice * CLASSES + n) * UNITS + k; };
  const bool more = t + 1 < p.length;
  let_next_come();
  if (more) product.load(line);
  await_last();
  EACH_ROWS {
    constexpr int PAIRS = (CLASSES / 2 + 15) / 16;
    const int row = tid / 16, lane = tid % 16;
    const int own = min(first + row, p.batch - 1);
    const int here = (base + own) * LOGITS + choice * CLASSES;
    const int given = (own * p.length + t) * LOGITS + choice * CLASSES;
    const bool forgot = !more || p.reset[own * p.length + t + 1];
    float2 grad[PAIRS], prob[PAIRS], from[PAIRS];
    UNROLL for (int i = 0; i < PAIRS; i++) {
      const int label = (i * 16 + lane) * 2;
      if (label >= CLASSES) continue;
      grad[i] = two(p.from_stochs + given + label);
      prob[i] = two(p.logits + here + label);
      from[i] = two(p.from_logits + given + label);
    }
    if (more) {
      const Pair rows(first, p.batch);
      const Shares<UNIT_TILES> shares(p.shares1, first, p.batch);
      const float2 inverse = rows.load(p.inverse + after * 4 + 1, 4);
      float2 mean;
      product.multiply_rows(
          sums, first > 0, line,
          [&](int k) {
            return Slope{rows.load(p.to_in + after * BOTH + UNITS, BOTH, k),
                         rows.load(p.pre1 + after * UNITS, UNITS, k)};
          },
          [&] {
            shares.settle(totals, [](float x) { return x * (1.f / UNITS); });
            __syncthreads();
            mean = make_float2(totals[product.upper], totals[product.upper + 8]);
          },
          [&](int k, const Slope& x) {
            return sloped(x, p.in1_scale + k, inverse, mean);
          });
    }
    float top = -MOST, total = 0, mean = 0;
    UNROLL for (int i = 0; i < PAIRS; i++) {
      const int label = (i * 16 + lane) * 2;
      if (label >= CLASSES) continue;
      if (!forgot) {
        float2 x = product.collect(sums, row, label);
        grad[i] = make_float2(grad[i].x + x.x, grad[i].y + x.y);
      }
      top = fmaxf(top, fmaxf(prob[i].x, prob[i].y));
    }
    UNROLL for (int m = 1; m < 16; m <<= 1)
      top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
    UNROLL for (int i = 0; i < PAIRS; i++) {
      if ((i * 16 + lane) * 2 >= CLASSES) continue;
      prob[i] = make_float2(__expf(prob[i].x - top), __expf(prob[i].y - top));
      total += prob[i].x + prob[i].y;
      mean += dot(prob[i], grad[i]);
    }
    total = 1.f / lane_sum<16>(total);
    mean = lane_sum<16>(mean) * total;
    if (first + row < p.batch)
      UNROLL for (int i = 0; i < PAIRS; i++) {
        const int label = (i * 16 + lane) * 2;
        if (label >= CLASSES) continue;
        const float part = (1.f - p.unimix) * total;
        keep(p.to_logits + here + label,
             make_float2(from[i].x + part * prob[i].x * (grad[i].x - mean),
                         from[i].y + part * prob[i].y * (grad[i].y - mean)));
      }
    __syncthreads();
  }
}

// The gradient behind a norm, its tile's share of the row's sum included.
struct Behind {
  float2 unit, scale;
  DEVICE Behind(const u16* pre, const float* scales, const float* inverse, bool exists) {
    unit = scale = none();
    if (!exists) return;
    unit = two(pre);
    scale = make_float2(fresh(scales), fresh(scales + 1));
    const float by = fresh(inverse);
    unit = make_float2(unit.x * by, unit.y * by);
  }
  template <int LANES>
  DEVICE void send(float2 x, u16* to, float* share, bool exists) const {
    x = rounded(make_float2(x.x * silu_slope(unit.x * scale.x),
                            x.y * silu_slope(unit.y * scale.y)));
    if (exists) keep(to, x);
    float product = x.x * scale.x * unit.x + x.y * scale.y * unit.y;
    product = lane_sum<LANES>(exists ? product : 0);
    if (exists && threadIdx.x % LANES == 0) *share = product;
  }
};

KERNEL back_posterior(Back p) {
  extern __shared__ __align__(16) float sums[];
  const int tid = threadIdx.x, unit = blockIdx.x * NARROW, base = p.t * p.batch;
  Tile<NARROW, LOGITS> product;
  auto line = [&](int n, int k) { return p.logit + (unit + n) * LOGITS + k; };
  let_next_come();
  product.load(line);
  await_last();
  EACH_ROWS {
    constexpr int LANES = NARROW / 2;
    const int row = tid / LANES, at = unit + tid % LANES * 2;
    const int own = min(first + row, p.batch - 1), here = base + own;
    const bool exists = row < 16 && first + row < p.batch;
    const Pair rows(first, p.batch);
    const Behind norm(p.preobs + here * UNITS + at, p.obs_scale + at,
                      p.inverse + here * 4 + 3, exists);
    product.multiply_rows(
        sums, first > 0, line,
        [&](int k) { return rows.load(p.to_logits + base * LOGITS, LOGITS, k); },
        [] {}, [](int, Fragment x) { return x; });
    if (row < 16)
      norm.send<LANES>(product.collect(sums, row, tid % LANES * 2),
                       p.to_obs + here * UNITS + at,
                       p.shares3 + own * UNIT_TILES + blockIdx.x, exists);
    __syncthreads();
  }
}

KERNEL back_gates(Back p) {
  extern __shared__ __align__(16) float sums[];
  __shared__ float totals[2][16];
  const int tid = threadIdx.x, t = p.t, base = t * p.batch, after = base + p.batch;
  const int column = blockIdx.x * CORE, group = column / WIDTH, inside = column % WIDTH;
  const bool more = t + 1 < p.length;
  Tile<CORE, BOTH> product;
  auto line = [&](int n, int k) { return p.both + (column + n) * BOTH + k; };
  let_next_come();
  product.load(line);
  await_last();
  EACH_ROWS {
    constexpr int LANES = CORE / 2;
    const int row = tid / LANES, off = tid % LANES * 2, at = column + off;
    const int own = first + row, here = base + own, up = product.upper;
    const int gate = here * (3 * DETER) + group * 3 * WIDTH + inside + off;
    const bool exists = row < 16 && own < p.batch;
    const Pair rows(first, p.batch);
    const Shares<UNIT_TILES> shares0(p.shares0, first, p.batch);
    const Shares<UNIT_TILES> shares3(p.shares3, first, p.batch);
    const float2 seen = rows.load(p.inverse + base * 4 + 3, 4);
    const float2 felt = more ? rows.load(p.inverse + after * 4, 4) : none();
    const bool upper_on = more && !p.reset[rows.upper * p.length + t + 1];
    const bool lower_on = more && !p.reset[rows.lower * p.length + t + 1];
    float2 grad = none(), r = none(), c = none(), u = none(), before = none();
    float2* carry = (float2*)(p.carry + own * DETER + at);
    if (exists) {
      grad = two(p.from_deters + (own * p.length + t) * DETER + at);
      r = two(p.gates + gate);
      c = two(p.gates + gate + WIDTH);
      u = two(p.gates + gate + 2 * WIDTH);
      before = two(p.deter + here * DETER + at);
      grad = make_float2(grad.x + fresh(&carry->x), grad.y + fresh(&carry->y));
    }
    float2 mean[2];
    product.multiply_rows(
        sums, first > 0, line,
        [&](int k) {
          if (k >= UNITS)
            return Slope{rows.load(p.to_obs + base * UNITS, UNITS, k - UNITS),
                         rows.load(p.preobs + base * UNITS, UNITS, k - UNITS)};
          if (!more) return Slope{};
          return Slope{rows.load(p.to_in + after * BOTH, BOTH, k),
                       rows.load(p.pre0 + after * UNITS, UNITS, k)};
        },
        [&] {
          auto use = [](float x) { return x * (1.f / UNITS); };
          shares0.settle(totals[0], use);
          shares3.settle(totals[1], use);
          __syncthreads();
          UNROLL for (int m = 0; m < 2; m++)
            mean[m] = make_float2(totals[m][up], totals[m][up + 8]);
        },
        [&](int k, const Slope& x) {
          if (k >= UNITS) return sloped(x, p.obs_scale + k - UNITS, seen, mean[1]);
          Fragment y = more ? sloped(x, p.in0_scale + k, felt, mean[0]) : Fragment{};
          UNROLL for (int i = 0; i < 4; i++) {  // nothing reaches back beyond a reset
            if (!upper_on) y.w[i] = 0;
            if (!lower_on) y.w[4 + i] = 0;
          }
          return y;
        });
    if (exists) {
      float2 x = product.collect(sums, row, off), to_r, to_c, to_u;
      grad = make_float2(grad.x + x.x, grad.y + x.y);
      auto slope = [](float grad, float r, float c, float u, float before, float& to_r,
                      float& to_c, float& to_u) {
        r = sigmoid(r);
        u = sigmoid(u - 1.f);
        float fresh = tanh_(r * c), inner = grad * u * (1.f - fresh * fresh);
        to_r = inner * c * r * (1.f - r);
        to_c = inner * r;
        to_u = grad * (fresh - before) * u * (1.f - u);
        return grad * (1.f - u);
      };
      float a = slope(grad.x, r.x, c.x, u.x, before.x, to_r.x, to_c.x, to_u.x);
      float b = slope(grad.y, r.y, c.y, u.y, before.y, to_r.y, to_c.y, to_u.y);
      keep(p.to_gates + gate, to_r);
      keep(p.to_gates + gate + WIDTH, to_c);
      keep(p.to_gates + gate + 2 * WIDTH, to_u);
      *carry = make_float2(a, b);
    }
    __syncthreads();
  }
}

KERNEL back_hidden(Back p) {
  extern __shared__ __align__(16) float sums[];
  const int tid = threadIdx.x, column = blockIdx.x * CORE, group = column / WIDTH;
  const int base = p.t * p.batch;
  Tile<CORE, 3 * WIDTH> product;
  auto line = [&](int n, int k) { return p.gru + (column + n) * (3 * WIDTH) + k; };
  let_next_come();
  product.load(line);
  await_last();
  EACH_ROWS {
    constexpr int LANES = CORE / 2;
    const int row = tid / LANES, at = column + tid % LANES * 2;
    const int own = min(first + row, p.batch - 1), here = base + own;
    const bool exists = row < 16 && first + row < p.batch;
    const Pair rows(first, p.batch);
    const Behind norm(p.prehid + here * DETER + at, p.hid_scale + at,
                      p.inverse + here * 4 + 2, exists);
    product.multiply_rows(
        sums, first > 0, line,
        [&](int k) {
          return rows.load(p.to_gates + base * (3 * DETER) + group * 3 * WIDTH,
                           3 * DETER, k);
        },
        [] {}, [](int, Fragment x) { return x; });
    if (row < 16)
      norm.send<LANES>(product.collect(sums, row, tid % LANES * 2),
                       p.to_hid + here * DETER + at,
                       p.shares2 + own * CORE_TILES + blockIdx.x, exists);
    __syncthreads();
  }
}

// Who fed the hidden layer: first the blocks for both inputs, then those for deter.
KERNEL back_inputs(Back p) {
  extern __shared__ __align__(16) float sums[];
  __shared__ float totals[16];
  const int tid = threadIdx.x, t = p.t, base = t * p.batch;
  constexpr int LINES = WIDTH + SHARED;  // of a block of the weight
  float2 inverse, mean;
  auto fetch = [&](const Pair& rows, int k) {
    return Slope{rows.load(p.to_hid + base * DETER, DETER, k),
                 rows.load(p.prehid + base * DETER, DETER, k)};
  };
  auto prepare = [&](const Shares<CORE_TILES>& shares) {
    const int up = threadIdx.x % 32 / 4;
    shares.settle(totals, [](float x) { return x * (1.f / DETER); });
    __syncthreads();
    mean = make_float2(totals[up], totals[up + 8]);
  };
  let_next_come();
  if (blockIdx.x < BOTH / NARROW) {
    const int unit = blockIdx.x * NARROW, side = unit >= UNITS;
    Tile<NARROW, DETER> product;
    auto line = [&](int n, int k) {
      return p.hid + (k / WIDTH * LINES + WIDTH + unit + n) * WIDTH + k % WIDTH;
    };
    product.load(line);
    await_last();
    EACH_ROWS {
      constexpr int LANES = NARROW / 2;
      const int row = tid / LANES, off = tid % LANES * 2,
                at = unit - side * UNITS + off;
      const int own = min(first + row, p.batch - 1), here = base + own;
      const bool exists = row < 16 && first + row < p.batch;
      const Pair rows(first, p.batch);
      const Shares<CORE_TILES> shares(p.shares2, first, p.batch);
      const Behind norm((side ? p.pre1 : p.pre0) + here * UNITS + at,
                        (side ? p.in1_scale : p.in0_scale) + at,
                        p.inverse + here * 4 + side, exists);
      inverse = rows.load(p.inverse + base * 4 + 2, 4);
      product.multiply_rows(
          sums, first > 0, line, [&](int k) { return fetch(rows, k); },
          [&] { prepare(shares); },
          [&](int k, const Slope& x) {
            return sloped(x, p.hid_scale + k, inverse, mean);
          });
      if (row < 16)
        norm.send<LANES>(product.collect(sums, row, off),
                         p.to_in + here * BOTH + unit + off,
                         (side ? p.shares1 : p.shares0) + own * UNIT_TILES + at / NARROW,
                         exists);
      __syncthreads();
    }
  } else {
    const int column = (blockIdx.x - BOTH / NARROW) * CORE, group = column / WIDTH;
    Tile<CORE, WIDTH> product;
    auto line = [&](int n, int k) {
      return p.hid + (group * LINES + column % WIDTH + n) * WIDTH + k;
    };
    product.load(line);
    await_last();
    EACH_ROWS {
      constexpr int LANES = CORE / 2;
      const int row = tid / LANES, off = tid % LANES * 2;
      const bool exists = row < 16 && first + row < p.batch;
      const Pair rows(first, p.batch);
      const Shares<CORE_TILES> shares(p.shares2, first, p.batch);
      float2* carry = (float2*)(p.carry + (first + row) * DETER + column + off);
      const bool forget = exists && p.reset[(first + row) * p.length + t];
      float2 before = none();
      if (exists) before = make_float2(fresh(&carry->x), fresh(&carry->y));
      inverse = rows.load(p.inverse + base * 4 + 2, 4);
      product.multiply_rows(
          sums, first > 0, line,
          [&](int k) { return fetch(rows, group * WIDTH + k); },
          [&] { prepare(shares); },
          [&](int k, const Slope& x) {
            return sloped(x, p.hid_scale + group * WIDTH + k, inverse, mean);
          });
      if (exists) {
        float2 x = product.collect(sums, row, off);
        x = make_float2(before.x + x.x, before.y + x.y);
        *carry = forget ? none() : x;
      }
      __syncthreads();
    }
  }
}
