// One step of the posterior scan as five kernels forth and five back, for any size.
//
// A block of threads computes a few columns of one layer for all rows, 16 at a time. Its
// eight warps share the inputs: a warp takes every eighth window of 32. Weights are laid
// out so that a thread's share of a window is one 16-byte load, and they are loaded
// before the block waits for the kernel before it, so that they stream in while that
// one still works.
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
  static constexpr int EARLY = MINE * NT <= 28 ? MINE : 28 / NT;  // held in registers
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int upper = lane / 4, quad = lane % 4;
  uint4 held[EARLY > 0 ? EARLY : 1][NT];

  DEVICE int window(int i) const { return (i * WARPS + warp) * 32 + 8 * quad; }
  DEVICE bool has(int i) const {
    return WINDOWS % WARPS == 0 || i * WARPS + warp < WINDOWS;
  }

  // `line(n, k)`: where the weights of column n begin at input k
  template <class Line>
  DEVICE void load(Line line) {
    UNROLL for (int i = 0; i < EARLY; i++)
      UNROLL for (int n = 0; n < NT; n++)
        held[i][n] =
            has(i) ? weights4(line(8 * n + upper, window(i))) : make_uint4(0, 0, 0, 0);
  }
  // `input(k)`: the fragment of inputs k..k+7 of this thread's two rows
  template <class Line, class Input>
  DEVICE void multiply_rows(float* sums, Line line, Input input) {
    float c[NT][4] = {};
    constexpr int CHUNK = 4;
    UNROLL for (int start = 0; start < MINE; start += CHUNK) {
      Fragment a[CHUNK];
      UNROLL for (int i = 0; i < CHUNK; i++)
        if (start + i < MINE && has(start + i)) a[i] = input(window(start + i));
      UNROLL for (int i = 0; i < CHUNK; i++) {
        const int at = start + i;
        if (at >= MINE || !has(at)) continue;
        UNROLL for (int n = 0; n < NT; n++) {
          uint4 v = at < EARLY ? held[at < EARLY ? at : 0][n]
                               : weights4(line(8 * n + upper, window(at)));
          u32 b0[2] = {v.x, v.y}, b1[2] = {v.z, v.w};
          multiply(c[n], a[i], 0, b0);
          multiply(c[n], a[i], 1, b1);
        }
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

// Sums over 16 rows from their shares, (row, COUNT); one warp a row.
template <int COUNT>
DEVICE void add_up(float* totals, const float* shares, int first, int batch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  UNROLL for (int r = warp; r < 16; r += WARPS) {
    float total = 0;
    if (first + r < batch)
      UNROLL for (int i = 0; i < COUNT; i += 32)
        if (i + lane < COUNT) total += fresh(shares + (first + r) * COUNT + i + lane);
    total = lane_sum<32>(total);
    if (lane == 0) totals[r] = total;
  }
}

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
};
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
DEVICE Fragment sloped(Fragment grad, const Fragment& x, const float* scale,
                       float2 inverse, float2 mean) {
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

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define EACH_ROWS for (int first = 0; first < p.batch; first += 16)

// ---- forth

KERNEL step_hidden(Step p) {
  extern __shared__ __align__(16) float sums[];
  __shared__ float totals[2][16];
  const int tid = threadIdx.x, t = p.t, tile = blockIdx.x;
  const int column = tile * CORE, group = column / WIDTH;
  Tile<CORE, FEED> product;
  auto line = [&](int n, int k) { return p.hid + (column + n) * FEED + k; };
  let_next_come();
  product.load(line);
  await_last();
  EACH_ROWS {
    add_up<UNIT_TILES>(totals[0], p.shares0, first, p.batch);
    add_up<1>(totals[1], p.shares1, first, p.batch);
    __syncthreads();
    if (tid < 32)
      totals[tid / 16][tid % 16] =
          rsqrtf(totals[tid / 16][tid % 16] * (1.f / UNITS) + p.eps);
    __syncthreads();
    const Pair rows(first, p.batch);
    const int up = product.upper, base = t * p.batch;
    product.multiply_rows(sums, line, [&](int k) {
      if (k < WIDTH) return rows.load(p.deter + base * DETER + group * WIDTH, DETER, k);
      const bool second = k >= WIDTH + UNITS;
      k -= second ? WIDTH + UNITS : WIDTH;
      Fragment x = rows.load((second ? p.pre1 : p.pre0) + base * UNITS, UNITS, k);
      x = activated(x, (second ? p.in1_scale : p.in0_scale) + k, totals[second][up],
                    totals[second][up + 8]);
      if (tile == 0) {
        u16* to = p.shared + base * SHARED + second * UNITS + k;
        if (first + up < p.batch)
          *(uint4*)(to + rows.upper * SHARED) =
              make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]);
        if (first + up + 8 < p.batch)
          *(uint4*)(to + rows.lower * SHARED) =
              make_uint4(x.w[4], x.w[5], x.w[6], x.w[7]);
      }
      return x;
    });
    constexpr int LANES = CORE / 2;
    const int row = tid / LANES, at = column + tid % LANES * 2;
    if (row < 16) {
      const bool exists = first + row < p.batch;
      float2 x = product.collect(sums, row, tid % LANES * 2);
      if (exists) {
        float2 h = two(p.hoisted + ((first + row) * p.length + t) * DETER + at);
        x = rounded(make_float2(x.x + h.x, x.y + h.y));
        keep(p.prehid + (base + first + row) * DETER + at, x);
      }
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
  const int tid = threadIdx.x, t = p.t, tile = blockIdx.x;
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
    add_up<CORE_TILES>(totals, p.shares2, first, p.batch);
    __syncthreads();
    if (tid < 16) totals[tid] = rsqrtf(totals[tid] * (1.f / DETER) + p.eps);
    __syncthreads();
    const Pair rows(first, p.batch);
    const int up = product.upper, base = t * p.batch;
    product.multiply_rows(sums, line, [&](int k) {
      k += group * WIDTH;
      Fragment x = rows.load(p.prehid + base * DETER, DETER, k);
      x = activated(x, p.hid_scale + k, totals[up], totals[up + 8]);
      if (inside == 0) {
        u16* to = p.hidden + base * DETER + k;
        if (first + up < p.batch)
          *(uint4*)(to + rows.upper * DETER) =
              make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]);
        if (first + up + 8 < p.batch)
          *(uint4*)(to + rows.lower * DETER) =
              make_uint4(x.w[4], x.w[5], x.w[6], x.w[7]);
      }
      return x;
    });
    constexpr int LANES = CORE / 2;
    const int row = tid / LANES, off = tid % LANES * 2, at = column + off;
    if (row < 16 && first + row < p.batch) {
      const int here = base + first + row;
      float2 value[3];
      UNROLL for (int m = 0; m < 3; m++) {
        const int gate = group * 3 * WIDTH + m * WIDTH + inside + off;
        float2 bias = two(p.gru_bias + gate);
        value[m] = product.collect(sums, row, m * CORE + off);
        value[m] = rounded(make_float2(value[m].x + bias.x, value[m].y + bias.y));
        keep(p.gates + here * (3 * DETER) + gate, value[m]);
      }
      float2 before = two(p.deter + here * DETER + at);
      float a = sigmoid(value[2].x - 1.f), b = sigmoid(value[2].y - 1.f);
      float2 deter = rounded(make_float2(
          a * tanh_(sigmoid(value[0].x) * value[1].x) + (1.f - a) * before.x,
          b * tanh_(sigmoid(value[0].y) * value[1].y) + (1.f - b) * before.y));
      keep(p.deters + here * DETER + at, deter);
      if (t + 1 < p.length) {
        if (p.reset[(first + row) * p.length + t + 1]) deter = make_float2(0, 0);
        keep(p.deter + (here + p.batch) * DETER + at, deter);
      }
    }
    if (tile == 0 && tid < 16 && first + tid < p.batch)
      p.inverse[(base + first + tid) * 4 + 2] = totals[tid];
    __syncthreads();
  }
}

KERNEL step_inputs(Step p) {
  extern __shared__ __align__(16) float sums[];
  const int tid = threadIdx.x, t = p.t;
  const int unit = blockIdx.x * NARROW;
  const bool is_obs = unit >= UNITS;
  Tile<NARROW, DETER> product;
  auto line = [&](int n, int k) { return p.both + (unit + n) * DETER + k; };
  let_next_come();
  product.load(line);
  await_last();
  EACH_ROWS {
    const Pair rows(first, p.batch);
    const int base = t * p.batch;
    product.multiply_rows(sums, line, [&](int k) {
      return rows.load(p.deters + base * DETER, DETER, k);
    });
    constexpr int LANES = NARROW / 2;
    const int row = tid / LANES, off = tid % LANES * 2;
    if (row < 16) {
      const bool exists = first + row < p.batch;
      const int given = (first + row) * p.length + t, here = base + first + row;
      float2 x = product.collect(sums, row, off);
      if (exists && is_obs) {
        const int at = unit - UNITS + off;
        float2 token = two(p.tokens + given * UNITS + at);
        x = rounded(make_float2(x.x + token.x, x.y + token.y));
        keep(p.preobs + here * UNITS + at, x);
      } else if (exists && t + 1 < p.length) {
        if (p.reset[given + 1]) x = make_float2(0, 0);
        float2 bias = two(p.in0_bias + unit + off);
        x = rounded(make_float2(x.x + bias.x, x.y + bias.y));
        keep(p.pre0 + (here + p.batch) * UNITS + unit + off, x);
      }
      float squares = lane_sum<LANES>(dot(x, x));
      if (exists && tid % LANES == 0)
        (is_obs ? p.shares3
                : p.shares0)[(first + row) * UNIT_TILES + unit % UNITS / NARROW] =
            squares;
    }
    __syncthreads();
  }
}

KERNEL step_posterior(Step p) {
  extern __shared__ __align__(16) float sums[];
  __shared__ float totals[16];
  const int tid = threadIdx.x, t = p.t, choice = blockIdx.x;
  Tile<CLASSES, UNITS> product;
  auto line = [&](int n, int k) {
    return p.logit + (choice * CLASSES + n) * UNITS + k;
  };
  let_next_come();
  product.load(line);
  await_last();
  EACH_ROWS {
    add_up<UNIT_TILES>(totals, p.shares3, first, p.batch);
    __syncthreads();
    if (tid < 16) totals[tid] = rsqrtf(totals[tid] * (1.f / UNITS) + p.eps);
    __syncthreads();
    const Pair rows(first, p.batch);
    const int up = product.upper, base = t * p.batch;
    product.multiply_rows(sums, line, [&](int k) {
      Fragment x = rows.load(p.preobs + base * UNITS, UNITS, k);
      x = activated(x, p.obs_scale + k, totals[up], totals[up + 8]);
      if (choice == 0) {
        u16* to = p.seen + base * UNITS + k;
        if (first + up < p.batch)
          *(uint4*)(to + rows.upper * UNITS) =
              make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]);
        if (first + up + 8 < p.batch)
          *(uint4*)(to + rows.lower * UNITS) =
              make_uint4(x.w[4], x.w[5], x.w[6], x.w[7]);
      }
      return x;
    });
    // 16 lanes a row, each with every sixteenth pair of classes
    constexpr int PAIRS = (CLASSES / 2 + 15) / 16;
    const int row = tid / 16, lane = tid % 16;
    const int own = min(first + row, p.batch - 1);
    const bool exists = first + row < p.batch;
    const int here = (base + own) * LOGITS + choice * CLASSES;
    const float* clocks = p.clocks + (own * p.length + t) * LOGITS + choice * CLASSES;
    float2 logit[PAIRS];
    float top = -MOST, total = 0;
    UNROLL for (int i = 0; i < PAIRS; i++) {
      const int label = (i * 16 + lane) * 2;
      if (label >= CLASSES) continue;
      float2 bias = two(p.logit_bias + choice * CLASSES + label);
      logit[i] = product.collect(sums, row, label);
      logit[i] = rounded(make_float2(logit[i].x + bias.x, logit[i].y + bias.y));
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
      float a = __fdividef(logit[i].x * total + p.unimix / CLASSES, clocks[label]);
      float b = __fdividef(logit[i].y * total + p.unimix / CLASSES, clocks[label + 1]);
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
      const bool more = t + 1 < p.length;
      const bool forget = more && p.reset[own * p.length + t + 1];
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

// dynin1 of the next step, one row a block: a weight row per choice, added up
KERNEL step_choices(Step p) {
  __shared__ float squares[WARPS];
  const int tid = threadIdx.x, row = blockIdx.x;
  let_next_come();
  await_last();
  const bool forget = p.reset[row * p.length + p.t + 1];
  float total = 0;
  for (int at = 2 * tid; at < UNITS; at += 2 * THREADS) {
    float2 x = two(p.in1_bias + at);
    if (!forget)
      UNROLL for (int i = 0; i < CHOICES; i++) {
        const int label = i * CLASSES + (int)fresh1(p.choices + row * CHOICES + i);
        u32 w = *(const u32*)(p.in1 + label * UNITS + at);
        x.x += low(w);
        x.y += high(w);
      }
    x = rounded(x);
    keep(p.pre1 + ((p.t + 1) * p.batch + row) * UNITS + at, x);
    total += dot(x, x);
  }
  total = lane_sum<32>(total);
  if (tid % 32 == 0) squares[tid / 32] = total;
  __syncthreads();
  if (tid == 0) p.shares1[row] = sum8(squares);
}

// ---- back

KERNEL back_choices(Back p) {
  extern __shared__ __align__(16) float sums[];
  __shared__ float totals[16];
  const int tid = threadIdx.x, t = p.t, choice = blockIdx.x;
  Tile<CLASSES, UNITS> product;
  auto line = [&](int n, int k) { return p.in1 + (choice * CLASSES + n) * UNITS + k; };
  const bool more = t + 1 < p.length;
  let_next_come();
  if (more) product.load(line);
  await_last();
  EACH_ROWS {
    const int base = t * p.batch, after = base + p.batch;
    if (more) {
      add_up<UNIT_TILES>(totals, p.shares1, first, p.batch);
      __syncthreads();
      const Pair rows(first, p.batch);
      const int up = product.upper;
      const float2 inverse =
          make_float2(fresh(p.inverse + (after + rows.upper) * 4 + 1),
                      fresh(p.inverse + (after + rows.lower) * 4 + 1));
      const float2 mean =
          make_float2(totals[up] * (1.f / UNITS), totals[up + 8] * (1.f / UNITS));
      product.multiply_rows(sums, line, [&](int k) {
        return sloped(rows.load(p.to_in + after * BOTH + UNITS, BOTH, k),
                      rows.load(p.pre1 + after * UNITS, UNITS, k), p.in1_scale + k,
                      inverse, mean);
      });
    }
    constexpr int PAIRS = (CLASSES / 2 + 15) / 16;
    const int row = tid / 16, lane = tid % 16;
    const int own = min(first + row, p.batch - 1);
    const int here = (base + own) * LOGITS + choice * CLASSES;
    const int given = (own * p.length + t) * LOGITS + choice * CLASSES;
    const bool forgot = !more || p.reset[own * p.length + t + 1];
    float2 grad[PAIRS], prob[PAIRS];
    float top = -MOST, total = 0, mean = 0;
    UNROLL for (int i = 0; i < PAIRS; i++) {
      const int label = (i * 16 + lane) * 2;
      if (label >= CLASSES) continue;
      grad[i] = two(p.from_stochs + given + label);
      if (!forgot) {
        float2 x = product.collect(sums, row, label);
        grad[i] = make_float2(grad[i].x + x.x, grad[i].y + x.y);
      }
      prob[i] = two(p.logits + here + label);
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
        float2 from = two(p.from_logits + given + label);
        const float part = (1.f - p.unimix) * total;
        keep(p.to_logits + here + label,
             make_float2(from.x + part * prob[i].x * (grad[i].x - mean),
                         from.y + part * prob[i].y * (grad[i].y - mean)));
      }
    __syncthreads();
  }
}

// The gradient behind a norm, its tile's share of the row's sum included.
template <int LANES>
DEVICE void send(float2 x, const u16* pre, const float* scale, float inverse, u16* to,
                 float* share, bool exists) {
  float product = 0;
  if (exists) {
    float2 unit = two(pre);
    unit = make_float2(unit.x * inverse, unit.y * inverse);
    const float a = scale[0], b = scale[1];
    x = rounded(
        make_float2(x.x * silu_slope(unit.x * a), x.y * silu_slope(unit.y * b)));
    keep(to, x);
    product = x.x * a * unit.x + x.y * b * unit.y;
  }
  product = lane_sum<LANES>(product);
  if (exists && threadIdx.x % LANES == 0) *share = product;
}

KERNEL back_posterior(Back p) {
  extern __shared__ __align__(16) float sums[];
  const int tid = threadIdx.x, unit = blockIdx.x * NARROW;
  Tile<NARROW, LOGITS> product;
  auto line = [&](int n, int k) { return p.logit + (unit + n) * LOGITS + k; };
  let_next_come();
  product.load(line);
  await_last();
  EACH_ROWS {
    const Pair rows(first, p.batch);
    const int base = p.t * p.batch;
    product.multiply_rows(sums, line, [&](int k) {
      return rows.load(p.to_logits + base * LOGITS, LOGITS, k);
    });
    constexpr int LANES = NARROW / 2;
    const int row = tid / LANES, at = unit + tid % LANES * 2;
    if (row < 16) {
      const int own = min(first + row, p.batch - 1), here = base + own;
      send<LANES>(product.collect(sums, row, tid % LANES * 2),
                  p.preobs + here * UNITS + at, p.obs_scale + at,
                  p.inverse[here * 4 + 3], p.to_obs + here * UNITS + at,
                  p.shares3 + own * UNIT_TILES + blockIdx.x, first + row < p.batch);
    }
    __syncthreads();
  }
}

KERNEL back_gates(Back p) {
  extern __shared__ __align__(16) float sums[];
  __shared__ float totals[2][16];
  const int tid = threadIdx.x, t = p.t;
  const int column = blockIdx.x * CORE, group = column / WIDTH, inside = column % WIDTH;
  const bool more = t + 1 < p.length;
  Tile<CORE, BOTH> product;
  auto line = [&](int n, int k) { return p.both + (column + n) * BOTH + k; };
  let_next_come();
  product.load(line);
  await_last();
  EACH_ROWS {
    const int base = t * p.batch, after = base + p.batch;
    add_up<UNIT_TILES>(totals[0], p.shares0, first, p.batch);
    add_up<UNIT_TILES>(totals[1], p.shares3, first, p.batch);
    __syncthreads();
    const Pair rows(first, p.batch);
    const int up = product.upper;
    const bool upper_on = more && !p.reset[rows.upper * p.length + t + 1];
    const bool lower_on = more && !p.reset[rows.lower * p.length + t + 1];
    product.multiply_rows(sums, line, [&](int k) {
      const bool is_obs = k >= UNITS;
      if (!is_obs && !more) return Fragment{};
      k -= is_obs ? UNITS : 0;
      const int where = is_obs ? base : after;
      const float* inverse = p.inverse + where * 4 + (is_obs ? 3 : 0);
      Fragment x = sloped(
          is_obs ? rows.load(p.to_obs + base * UNITS, UNITS, k)
                 : rows.load(p.to_in + after * BOTH, BOTH, k),
          rows.load((is_obs ? p.preobs : p.pre0) + where * UNITS, UNITS, k),
          (is_obs ? p.obs_scale : p.in0_scale) + k,
          make_float2(fresh(inverse + rows.upper * 4), fresh(inverse + rows.lower * 4)),
          make_float2(totals[is_obs][up] * (1.f / UNITS),
                      totals[is_obs][up + 8] * (1.f / UNITS)));
      if (!is_obs)  // nothing reaches back beyond a reset
        UNROLL for (int i = 0; i < 4; i++) {
          if (!upper_on) x.w[i] = 0;
          if (!lower_on) x.w[4 + i] = 0;
        }
      return x;
    });
    constexpr int LANES = CORE / 2;
    const int row = tid / LANES, off = tid % LANES * 2, at = column + off;
    if (row < 16 && first + row < p.batch) {
      const int own = first + row, here = base + own;
      float2 grad = product.collect(sums, row, off);
      float2 from = two(p.from_deters + (own * p.length + t) * DETER + at);
      float2* carry = (float2*)(p.carry + own * DETER + at);
      grad = make_float2(grad.x + from.x + fresh(&carry->x),
                         grad.y + from.y + fresh(&carry->y));
      const int gate = here * (3 * DETER) + group * 3 * WIDTH + inside + off;
      float2 r = two(p.gates + gate), c = two(p.gates + gate + WIDTH),
             u = two(p.gates + gate + 2 * WIDTH);
      float2 before = two(p.deter + here * DETER + at), to_r, to_c, to_u;
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
      float x = slope(grad.x, r.x, c.x, u.x, before.x, to_r.x, to_c.x, to_u.x);
      float y = slope(grad.y, r.y, c.y, u.y, before.y, to_r.y, to_c.y, to_u.y);
      keep(p.to_gates + gate, to_r);
      keep(p.to_gates + gate + WIDTH, to_c);
      keep(p.to_gates + gate + 2 * WIDTH, to_u);
      *carry = make_float2(x, y);
    }
    __syncthreads();
  }
}

KERNEL back_hidden(Back p) {
  extern __shared__ __align__(16) float sums[];
  const int tid = threadIdx.x, column = blockIdx.x * CORE, group = column / WIDTH;
  Tile<CORE, 3 * WIDTH> product;
  auto line = [&](int n, int k) { return p.gru + (column + n) * (3 * WIDTH) + k; };
  let_next_come();
  product.load(line);
  await_last();
  EACH_ROWS {
    const Pair rows(first, p.batch);
    const int base = p.t * p.batch;
    product.multiply_rows(sums, line, [&](int k) {
      return rows.load(p.to_gates + base * (3 * DETER) + group * 3 * WIDTH, 3 * DETER,
                       k);
    });
    constexpr int LANES = CORE / 2;
    const int row = tid / LANES, at = column + tid % LANES * 2;
    if (row < 16) {
      const int own = min(first + row, p.batch - 1), here = base + own;
      send<LANES>(product.collect(sums, row, tid % LANES * 2),
                  p.prehid + here * DETER + at, p.hid_scale + at,
                  p.inverse[here * 4 + 2], p.to_hid + here * DETER + at,
                  p.shares2 + own * CORE_TILES + blockIdx.x, first + row < p.batch);
    }
    __syncthreads();
  }
}

// Who fed the hidden layer: first the blocks for both inputs, then those for deter.
KERNEL back_inputs(Back p) {
  extern __shared__ __align__(16) float sums[];
  __shared__ float totals[16];
  const int tid = threadIdx.x, t = p.t;
  constexpr int LINES = WIDTH + SHARED;  // of a block of the weight
  const bool is_own = blockIdx.x >= BOTH / NARROW;
  auto slope = [&](const Pair& rows, int base, int k) {
    const float* inverse = p.inverse + base * 4 + 2;
    const int up = threadIdx.x % 32 / 4;
    return sloped(
        rows.load(p.to_hid + base * DETER, DETER, k),
        rows.load(p.prehid + base * DETER, DETER, k), p.hid_scale + k,
        make_float2(fresh(inverse + rows.upper * 4), fresh(inverse + rows.lower * 4)),
        make_float2(totals[up] * (1.f / DETER), totals[up + 8] * (1.f / DETER)));
  };
  let_next_come();
  if (!is_own) {
    const int unit = blockIdx.x * NARROW, side = unit >= UNITS;
    Tile<NARROW, DETER> product;
    auto line = [&](int n, int k) {
      return p.hid + (k / WIDTH * LINES + WIDTH + unit + n) * WIDTH + k % WIDTH;
    };
    product.load(line);
    await_last();
    EACH_ROWS {
      const int base = t * p.batch;
      add_up<CORE_TILES>(totals, p.shares2, first, p.batch);
      __syncthreads();
      const Pair rows(first, p.batch);
      product.multiply_rows(sums, line, [&](int k) { return slope(rows, base, k); });
      constexpr int LANES = NARROW / 2;
      const int row = tid / LANES, off = tid % LANES * 2,
                at = unit - side * UNITS + off;
      if (row < 16) {
        const int own = min(first + row, p.batch - 1), here = base + own;
        send<LANES>(product.collect(sums, row, off),
                    (side ? p.pre1 : p.pre0) + here * UNITS + at,
                    (side ? p.in1_scale : p.in0_scale) + at, p.inverse[here * 4 + side],
                    p.to_in + here * BOTH + unit + off,
                    (side ? p.shares1 : p.shares0) + own * UNIT_TILES + at / NARROW,
                    first + row < p.batch);
      }
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
      const int base = t * p.batch;
      add_up<CORE_TILES>(totals, p.shares2, first, p.batch);
      __syncthreads();
      const Pair rows(first, p.batch);
      product.multiply_rows(
          sums, line, [&](int k) { return slope(rows, base, group * WIDTH + k); });
      constexpr int LANES = CORE / 2;
      const int row = tid / LANES, off = tid % LANES * 2;
      if (row < 16 && first + row < p.batch) {
        float2 x = product.collect(sums, row, off);
        float2* carry = (float2*)(p.carry + (first + row) * DETER + column + off);
        const bool forget = p.reset[(first + row) * p.length + t];
        float2 y = make_float2(fresh(&carry->x) + x.x, fresh(&carry->y) + x.y);
        *carry = forget ? make_float2(0, 0) : y;
      }
      __syncthreads();
    }
  }
}
