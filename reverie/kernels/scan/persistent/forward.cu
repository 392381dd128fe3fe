// The posterior scan: one step is five exchanges.
//
//   hidden    in0, in1 -> hidden layer of the core         grid: in0, in1
//   gates     hidden -> gates -> new deter                 grid: row sums of the norm
//   inputs    deter -> shares of [in0 | obs]               16 blocks: deter
//   posterior shares -> obs -> logits -> choices           grid: shares
//   choices   choices -> in1 of the next step              8 blocks: choices

struct Forward {
  // weights
  const u16 *in0, *in1, *hid, *gru, *obs, *logit;
  const u16 *in0_bias, *in1_bias, *gru_bias, *logit_bias;
  const float *in0_scale, *in1_scale, *hid_scale, *obs_scale;
  // inputs, (row, time, width)
  const u16 *hoisted, *tokens;
  const float* clocks;
  const u8* reset;
  // exchanged and kept, (time, row, width); pre0, pre1 and deter have a first step
  u16 *pre0, *pre1, *shared, *prehid, *deters;
  // kept
  u16 *deter, *stoch, *stochs, *hidden, *gates, *preobs, *seen, *logits;
  float* inverse;  // of the norms: (time, row, 4) for in0, in1, hid, obs
  // exchanged only, (time, ...)
  float* shares;
  u64* squares;
  u32* choices;
  int length, obs_stride;  // of a row of the posterior's weight
  float eps, unimix;
};

DEVICE float squares8(const u32* w) {
  float s = 0;
  UNROLL for (int i = 0; i < 4; i++)
    s += low(w[i]) * low(w[i]) + high(w[i]) * high(w[i]);
  return s;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) scan_forward(Forward p) {
  constexpr int HID = 24, GATES = 56, BOTHS = 40;  // padded rows of the warps' sums
  __shared__ float hid_sums[WARPS * ROWS * HID];
  __shared__ float gate_sums[WARPS * ROWS * GATES];
  extern __shared__ __align__(16) float dynamic[];
  float* both_sums = dynamic;                               // WARPS * ROWS * BOTHS
  u16* columns = (u16*)(both_sums + WARPS * ROWS * BOTHS);  // LOGITS x 34: in1's weight
  __shared__ float in1_squares[WARPS * ROWS], hid_inverse[ROWS], warp_squares[16];
  __shared__ float logit_sums[OWN];
  __shared__ __align__(16) u16 seen_row[UNITS];

  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, cta = blockIdx.x;
  const int group = cta / SLICES, slice = cta % SLICES;  // place in the core
  const int mine = cta / PARTS, part = cta % PARTS;      // row to help with
  const int upper = lane / 4, quad = lane % 4, lower = upper + 8;
  const int window = 32 * warp + 8 * quad;                // this thread's 8 inputs
  const int row = tid / COLUMNS, column = tid % COLUMNS;  // this thread's output
  const int first = group * WIDTH + slice * COLUMNS, at = first + column;
  const int length = p.length;

  // ---- weights, once
  u32 w_hid[3][2][2][2], w_gru[2][6][2], w_both[2][4][2], w_logit[8][2][2];
  UNROLL for (int half = 0; half < 2; half++)
    UNROLL for (int e = 0; e < 2; e++) {
      int k = window + 4 * half + 2 * e;
      UNROLL for (int n = 0; n < 2; n++)
        UNROLL for (int i = 0; i < 3; i++)
          w_hid[i][half][n][e] =
              pair(p.hid + (group * (WIDTH + SHARED) + i * UNITS + k) * WIDTH +
                       slice * COLUMNS + n * 8 + upper,
                   WIDTH);
      UNROLL for (int n = 0; n < 6; n++)
        w_gru[half][n][e] =
            pair(p.gru + (group * WIDTH + k) * (3 * WIDTH) + n / 2 * WIDTH +
                     slice * COLUMNS + n % 2 * 8 + upper,
                 3 * WIDTH);
      UNROLL for (int n = 0; n < 4; n++) {
        int unit = slice * 32 + n * 8 + upper;
        const u16* w =
            unit < UNITS ? p.in0 + unit * DETER : p.obs + (unit - UNITS) * p.obs_stride;
        w_both[half][n][e] = word(w + group * WIDTH + k);
      }
      UNROLL for (int m = 0; m < 8; m++)
        w_logit[m][half][e] = word(p.logit + (part * OWN + warp * 8 + upper) * UNITS +
                                   32 * m + 8 * quad + 4 * half + 2 * e);
    }
  for (int x = tid; x < LOGITS * 32; x += THREADS)
    columns[x % LOGITS * 34 + x / LOGITS] =
        p.in1[(part * 32 + x / LOGITS) * LOGITS + x % LOGITS];
  float in1_scale[8], hid_scale[8];
  UNROLL for (int i = 0; i < 8; i++) {
    in1_scale[i] = p.in1_scale[window + i];
    hid_scale[i] = p.hid_scale[group * WIDTH + window + i];
  }
  const float in0_bias = wide(p.in0_bias[tid]), in0_scale = p.in0_scale[tid];
  const float obs_scale = p.obs_scale[tid];
  const float logit_bias = tid < OWN ? wide(p.logit_bias[part * OWN + tid]) : 0.f;
  const int pick = part * 32 + warp * 4 + lane % 2 * 2;  // two columns of in1
  const float in1_bias0 = wide(p.in1_bias[pick]),
              in1_bias1 = wide(p.in1_bias[pick + 1]);
  const u16* bias = p.gru_bias + group * 3 * WIDTH + slice * COLUMNS + column;
  const float reset_bias = wide(bias[0]), candidate_bias = wide(bias[WIDTH]);
  const float update_bias = wide(bias[2 * WIDTH]);

  // ---- the state before the first step
  float before = wide(p.deter[row * DETER + at]);
  float acc[2][4] = {};  // the hidden layer's sums so far
  {
    const u16* deter = p.deter + upper * DETER + group * WIDTH + window;
    multiply<2>(acc, fragment(load4(deter), load4(deter + 8 * DETER)), w_hid[0]);
  }
  // dynin0 of one row, normalized and sent to the core; all helpers compute it
  auto send_in0 = [&](float x, int t) {
    x = rounded(x);
    float squares = lane_sum<32>(x * x);
    if (lane == 0) warp_squares[8 + warp] = squares;
    __syncthreads();
    float inverse = rsqrtf(sum8(warp_squares + 8) * (1.f / UNITS) + p.eps);
    int here = t * ROWS + mine;
    float y = silu(rounded(x * inverse * in0_scale));
    float next = __shfl_down_sync(~0u, y, 1);
    if (warp == part && !(tid & 1))
      store1(p.shared + here * SHARED + tid, pack(y, next));
    if (part == 0) {
      p.pre0[here * UNITS + tid] = narrow(x);
      if (tid == 0) p.inverse[here * 4] = inverse;
    }
  };
  __syncthreads();
  send_in0(wide(p.pre0[mine * UNITS + tid]), 0);
  float hoisted = wide(p.hoisted[row * length * DETER + at]);

  for (int t = 0; t < length; t++) {
    const int next = t + 1 < length ? t + 1 : t;  // inputs are loaded one step ahead
    const int here = t * ROWS + row, spot = t * ROWS + mine;
    const int above = t * ROWS + upper, below = t * ROWS + lower;

    // ---- hidden
    {
      Fragment x = await(p.shared + above * SHARED + window, 8 * SHARED);
      multiply<2>(acc, x, w_hid[1]);
      x = await(p.pre1 + above * UNITS + window, 8 * UNITS);
      float a = squares8(x.w), b = squares8(x.w + 4);
      a = lane_sum<4>(a);
      b = lane_sum<4>(b);
      if (quad == 0) {
        in1_squares[warp * ROWS + upper] = a;
        in1_squares[warp * ROWS + lower] = b;
      }
      __syncthreads();
      a = b = 0;
      UNROLL for (int m = 0; m < WARPS; m++) {
        a += in1_squares[m * ROWS + upper];
        b += in1_squares[m * ROWS + lower];
      }
      a = rsqrtf(a * (1.f / UNITS) + p.eps);
      b = rsqrtf(b * (1.f / UNITS) + p.eps);
      norm_silu(x.w, a, in1_scale);
      norm_silu(x.w + 4, b, in1_scale);
      multiply<2>(acc, x, w_hid[2]);
      deposit<2, HID>(hid_sums, warp, lane, acc);
      __syncthreads();
      float h = rounded(collect<HID>(hid_sums, row, column) + hoisted);
      publish(p.prehid + here * DETER + at, column, h);
      float squares = lane_sum<16>(h * h);
      if (column == 0) add_share<20>(p.squares + (t * ROWS + row) * LINE, squares);
      if (cta == warp * SLICES) {  // kept for the way back, one warp's share each
        if (warp == 0 && quad == 0) {
          p.inverse[above * 4 + 1] = a;
          p.inverse[below * 4 + 1] = b;
        }
        u16* keep = p.shared + UNITS + window;
        *(uint4*)(keep + above * SHARED) = make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]);
        *(uint4*)(keep + below * SHARED) = make_uint4(x.w[4], x.w[5], x.w[6], x.w[7]);
      }
    }
    hoisted = wide(p.hoisted[(row * length + next) * DETER + at]);
    const float token = wide(p.tokens[(mine * length + t) * UNITS + tid]);
    const float clock =
        tid < OWN ? p.clocks[(mine * length + t) * LOGITS + part * OWN + tid] : 1.f;
    const bool forget = p.reset[row * length + next];        // before the next step,
    const bool forget_mine = p.reset[mine * length + next];  // by this thread's roles
    const bool forget_upper = p.reset[upper * length + next];
    const bool forget_lower = p.reset[lower * length + next];

    // ---- gates
    {
      if (tid < ROWS) {
        float total = await_total<20>(p.squares + (t * ROWS + tid) * LINE);
        float inverse = rsqrtf(total * (1.f / DETER) + p.eps);
        hid_inverse[tid] = inverse;
        if (cta == 0) p.inverse[(t * ROWS + tid) * 4 + 2] = inverse;
      }
      Fragment x = await(p.prehid + above * DETER + group * WIDTH + window, 8 * DETER);
      __syncthreads();
      norm_silu(x.w, hid_inverse[upper], hid_scale);
      norm_silu(x.w + 4, hid_inverse[lower], hid_scale);
      float c[6][4] = {};
      multiply<6>(c, x, w_gru);
      deposit<6, GATES>(gate_sums, warp, lane, c);
      if (slice == warp) {
        u16* keep = p.hidden + above * DETER + group * WIDTH + window;
        *(uint4*)keep = make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]);
        *(uint4*)(keep + 8 * DETER) = make_uint4(x.w[4], x.w[5], x.w[6], x.w[7]);
      }
      __syncthreads();
      float reset = rounded(collect<GATES>(gate_sums, row, column) + reset_bias);
      float candidate =
          rounded(collect<GATES>(gate_sums, row, 16 + column) + candidate_bias);
      float update = rounded(collect<GATES>(gate_sums, row, 32 + column) + update_bias);
      float share = sigmoid(update - 1.f);
      float deter = share * tanh_(sigmoid(reset) * candidate) + (1.f - share) * before;
      deter = rounded(deter);
      publish(p.deters + here * DETER + at, column, deter);
      before = forget ? 0.f : deter;
      u16* keep =
          p.gates + here * (3 * DETER) + group * 3 * WIDTH + slice * COLUMNS + column;
      keep[0] = narrow(reset);
      keep[WIDTH] = narrow(candidate);
      keep[2 * WIDTH] = narrow(update);
      if (t + 1 < length) p.deter[(here + ROWS) * DETER + at] = narrow(before);
    }

    // ---- inputs: this block's share of dynin0 (for the next step) and of obs0
    {
      Fragment x = await(p.deters + above * DETER + group * WIDTH + window, 8 * DETER);
      float c[4][4] = {};
      multiply<4>(c, x, w_both);
      deposit<4, BOTHS>(both_sums, warp, lane, c);
      __syncthreads();
      float2 v = collect2<BOTHS>(both_sums, row, 2 * column);
      store2(p.shares + ((t * GROUPS + group) * ROWS + row) * BOTH + slice * 32 +
                 2 * column,
             v.x, v.y);
      UNROLL for (int i = 0; i < 4; i++) {
        if (forget_upper) x.w[i] = 0;
        if (forget_lower) x.w[4 + i] = 0;
      }
      UNROLL for (int n = 0; n < 2; n++)
        acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
      multiply<2>(acc, x, w_hid[0]);
    }

    // ---- posterior
    {
      const float* shares = p.shares + (t * GROUPS * ROWS + mine) * BOTH + tid;
      u32 v[8], v0[8];
      look8(v, shares + UNITS, ROWS * BOTH);
      await8(v, shares + UNITS, ROWS * BOTH);
      look8(v0, shares, ROWS * BOTH);
      float obs = rounded(token + total8(v));
      float squares = lane_sum<32>(obs * obs);
      if (lane == 0) warp_squares[warp] = squares;
      __syncthreads();
      float inverse = rsqrtf(sum8(warp_squares) * (1.f / UNITS) + p.eps);
      u16 seen = narrow(silu(rounded(obs * inverse * obs_scale)));
      seen_row[tid] = seen;
      __syncthreads();
      float c[4][4] = {};
      UNROLL for (int m = 0; m < 8; m++)
        multiply_row(c[m % 4], *(const uint4*)(seen_row + 32 * m + 8 * quad),
                     w_logit[m]);
      if (upper == 0)
        *(float2*)(logit_sums + warp * 8 + 2 * quad) =
            make_float2(c[0][0] + c[1][0] + c[2][0] + c[3][0],
                        c[0][1] + c[1][1] + c[2][1] + c[3][1]);
      __syncthreads();
      if (warp < OWN / 32) {
        u16 kept = narrow(logit_sums[tid] + logit_bias);
        float logit = wide(kept), e = __expf(logit - half_max(logit));
        float prob =
            (1.f - p.unimix) * __fdividef(e, lane_sum<CLASSES>(e)) + p.unimix / CLASSES;
        float score = __fdividef(prob, clock), best = half_max(score);
        u32 winners = __ballot_sync(~0u, !(score < best)) >> (lane & CLASSES) & 0xFFFFu;
        int choice = __ffs(winners) - 1;
        if (lane % CLASSES == 0)
          store1(p.choices + (t * ROWS + mine) * CHOICES + part * 4 + tid / CLASSES,
                 choice);
        int kept_at = spot * LOGITS + part * OWN + tid;
        u16 hot = lane % CLASSES == choice ? 0x3F80 : 0;  // one, or zero
        p.logits[kept_at] = kept;
        p.stochs[kept_at] = hot;
        if (t + 1 < length) p.stoch[kept_at + ROWS * LOGITS] = forget_mine ? 0 : hot;
      }
      await8(v0, shares, ROWS * BOTH);
      if (t + 1 < length) send_in0(in0_bias + (forget_mine ? 0.f : total8(v0)), t + 1);
      if (part == 1) {
        p.preobs[spot * UNITS + tid] = narrow(obs);
        p.seen[spot * UNITS + tid] = seen;
        if (tid == 0) p.inverse[spot * 4 + 3] = inverse;
      }
    }

    // ---- choices: a sum of weight columns is dynin1 of the next step
    if (t + 1 < length) {
      const int choice = lane / 2;
      const u32* p_choice = p.choices + (t * ROWS + mine) * CHOICES + choice;
      u32 a, b;
      Spin spin;
      while (true) {
        a = load1(p_choice);
        b = load1(p_choice + 16);
        if (a != EMPTY && b != EMPTY) break;
        spin();
      }
      __syncwarp();
      const u16* w = columns + warp * 4 + lane % 2 * 2;
      a = word(w + (choice * CLASSES + a) * 34);
      b = word(w + ((choice + 16) * CLASSES + b) * 34);
      float x = low(a) + low(b), y = high(a) + high(b);
      UNROLL for (int m = 2; m < 32; m <<= 1) {
        x += __shfl_xor_sync(~0u, x, m);
        y += __shfl_xor_sync(~0u, y, m);
      }
      if (forget_mine) x = y = 0;
      if (lane < 2)
        store1(p.pre1 + (spot + ROWS) * UNITS + pick,
               pack(x + in1_bias0, y + in1_bias1));
    }
  }
}
