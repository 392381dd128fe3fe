// The way back: data gradients only, last step first. Again five exchanges a step.
//
//   choices   in1 of the step after -> choices -> logits -> shares of obs
//   posterior shares -> obs                                 8 blocks: shares
//   gates     obs, in0 of the step after -> deter -> gates  grid: obs, in0
//   hidden    gates -> hidden layer of the core             16 blocks: gates
//   inputs    hidden -> shares of [in0 | in1]               grid: row sums of the norm
//   and       shares -> in0, in1                            grid: shares
//
// A name means the gradient of the value so named. Sums over time (biases and scales)
// stay in registers until the end; sums over rows are left to the caller.

struct Backward {
  // weights
  const u16 *in0, *in1, *hid, *gru, *obs, *logit;
  const float *in0_scale, *in1_scale, *hid_scale, *obs_scale;
  // what the forward pass kept, (time, row, width)
  const u16 *pre0, *pre1, *prehid, *gates, *preobs, *logits, *deter;
  const float* inverse;
  const u8* reset;
  // gradients that arrive, (row, time, width)
  const u16 *from_deters, *from_stochs, *from_logits;
  // exchanged and kept, (time, row, width)
  u16 *to_obs, *to_in0, *to_gates;
  // exchanged only
  u16* before_norm;               // (time, row, DETER)
  float *obs_shares, *in_shares;  // (time, ...)
  u64* products;
  // kept
  u16 *to_in1, *to_hid, *to_logits;
  float* sums;  // (row, SUMS)
  int length, obs_stride;
  float unimix;
};

constexpr int SUM_HID_SCALE = 0, SUM_HID_BIAS = DETER, SUM_GATES = 2 * DETER;
constexpr int SUM_IN0_SCALE = 5 * DETER, SUM_IN0_BIAS = SUM_IN0_SCALE + UNITS;
constexpr int SUM_IN1_SCALE = SUM_IN0_BIAS + UNITS,
              SUM_IN1_BIAS = SUM_IN1_SCALE + UNITS;
constexpr int SUM_OBS_SCALE = SUM_IN1_BIAS + UNITS, SUM_LOGITS = SUM_OBS_SCALE + UNITS;
constexpr int SUMS = SUM_LOGITS + LOGITS;

extern "C" __global__ void __launch_bounds__(THREADS, 1) scan_backward(Backward p) {
  constexpr int SMALL = 24, LARGE = 56;  // padded rows of the warps' sums
  extern __shared__ __align__(16) float dynamic[];
  float* deter_sums = dynamic;                          // WARPS * ROWS * SMALL
  float* hid_sums = deter_sums + WARPS * ROWS * SMALL;  // WARPS * ROWS * SMALL
  float* in_sums = hid_sums + WARPS * ROWS * SMALL;     // WARPS * ROWS * LARGE
  __shared__ float row_mean[ROWS], warp_sums[24], choice_sums[OWN];
  __shared__ __align__(16) u16 in1_row[UNITS], logit_row[OWN];

  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, cta = blockIdx.x;
  const int group = cta / SLICES, slice = cta % SLICES;
  const int mine = cta / PARTS, part = cta % PARTS;
  const int upper = lane / 4, quad = lane % 4, lower = upper + 8;
  const int window = 32 * warp + 8 * quad;
  const int row = tid / COLUMNS, column = tid % COLUMNS;
  const int first = group * WIDTH + slice * COLUMNS, at = first + column;
  const int length = p.length;

  // ---- weights, once: the same matrices, read across
  u32 w_obs[2][2][2], w_in0[2][2][2], w_gru[3][2][2][2], w_own[2][2][2], w_in[2][4][2];
  u32 w_in1[8][2][2], w_logit[2][2][4][2];
  UNROLL for (int half = 0; half < 2; half++)
    UNROLL for (int e = 0; e < 2; e++) {
      int k = window + 4 * half + 2 * e;
      UNROLL for (int n = 0; n < 2; n++) {
        int unit = slice * COLUMNS + n * 8 + upper, deter = group * WIDTH + unit;
        w_obs[half][n][e] = pair(p.obs + k * p.obs_stride + deter, p.obs_stride);
        w_in0[half][n][e] = pair(p.in0 + k * DETER + deter, DETER);
        UNROLL for (int m = 0; m < 3; m++)
          w_gru[m][half][n][e] =
              word(p.gru + (group * WIDTH + unit) * (3 * WIDTH) + m * WIDTH + k);
        w_own[half][n][e] = word(p.hid + (group * (WIDTH + SHARED) + unit) * WIDTH + k);
      }
      UNROLL for (int n = 0; n < 4; n++)
        w_in[half][n][e] = word(
            p.hid +
            (group * (WIDTH + SHARED) + WIDTH + slice * 32 + n * 8 + upper) * WIDTH +
            k);
      UNROLL for (int m = 0; m < 8; m++)
        w_in1[m][half][e] =
            pair(p.in1 + (32 * m + 8 * quad + 4 * half + 2 * e) * LOGITS + part * OWN +
                     warp * 8 + upper,
                 LOGITS);
      UNROLL for (int m = 0; m < 2; m++)
        UNROLL for (int n = 0; n < 4; n++)
          w_logit[m][half][n][e] = pair(
              p.logit + (part * OWN + 32 * m + 8 * quad + 4 * half + 2 * e) * UNITS +
                  32 * warp + n * 8 + upper,
              UNITS);
    }
  const float in0_scale = p.in0_scale[tid], in1_scale = p.in1_scale[tid];
  const float obs_scale = p.obs_scale[tid], hid_scale = p.hid_scale[at];

  float carry = 0;  // of this thread's deter, from the step after
  float sum_hid_scale = 0, sum_hid_bias = 0, sum_reset = 0, sum_candidate = 0;
  float sum_update = 0, sum_in0_scale = 0, sum_in0_bias = 0, sum_in1_scale = 0;
  float sum_in1_bias = 0, sum_obs_scale = 0, sum_logit = 0;
  bool forgot_mine = false, forgot_upper = false, forgot_lower = false;  // step after
  in1_row[tid] = 0;

  // the probabilities of a row, off the critical path: loaded early, computed later
  u16 ahead_logit = 0, ahead_stoch = 0, ahead_choice = 0;
  float prob = 0, from_stoch = 0, from_logit = 0;
  auto look_ahead = [&](int t) {
    if (warp >= OWN / 32 || t < 0) return;
    int given = (mine * length + t) * LOGITS + part * OWN + tid;
    ahead_choice = p.logits[(t * ROWS + mine) * LOGITS + part * OWN + tid];
    ahead_stoch = p.from_stochs[given];
    ahead_logit = p.from_logits[given];
  };
  auto prepare = [&]() {
    if (warp >= OWN / 32) return;
    from_stoch = wide(ahead_stoch);
    from_logit = wide(ahead_logit);
    float logit = wide(ahead_choice);
    prob = __expf(logit - half_max(logit));
    prob = __fdividef(prob, lane_sum<CLASSES>(prob));
  };
  look_ahead(length - 1);
  prepare();
  __syncthreads();

  for (int t = length - 1; t >= 0; t--) {
    const int here = t * ROWS + row, spot = t * ROWS + mine;
    const int above = t * ROWS + upper, below = t * ROWS + lower;

    // ---- choices
    {
      float c[4][4] = {};
      UNROLL for (int m = 0; m < 8; m++)
        multiply_row(c[m % 4], *(const uint4*)(in1_row + 32 * m + 8 * quad), w_in1[m]);
      if (upper == 0)
        *(float2*)(choice_sums + warp * 8 + 2 * quad) =
            make_float2(c[0][0] + c[1][0] + c[2][0] + c[3][0],
                        c[0][1] + c[1][1] + c[2][1] + c[3][1]);
      __syncthreads();
      if (warp < OWN / 32) {
        float grad = (forgot_mine ? 0.f : choice_sums[tid]) + from_stoch;
        float mean = lane_sum<CLASSES>(prob * grad);
        u16 kept = narrow(from_logit + (1.f - p.unimix) * prob * (grad - mean));
        logit_row[tid] = kept;
        sum_logit += wide(kept);
        p.to_logits[spot * LOGITS + part * OWN + tid] = kept;
      }
      __syncthreads();
      float d[4][4] = {};
      UNROLL for (int m = 0; m < 2; m++) {
        uint4 v = *(const uint4*)(logit_row + 32 * m + 8 * quad);
        Fragment a = fragment(v, v);
        multiply<4>(d, a, w_logit[m]);
      }
      UNROLL for (int n = 0; n < 4; n++)
        if (upper == n)
          store2(p.obs_shares + ((t * ROWS + mine) * PARTS + part) * UNITS + 32 * warp +
                     n * 8 + 2 * quad,
                 d[n][0], d[n][1]);
    }
    // what this step needs of the forward pass, before the first wait
    const float from_deter = wide(p.from_deters[(row * length + t) * DETER + at]);
    const float deter = wide(p.deter[here * DETER + at]);
    const float hid_inverse = p.inverse[here * 4 + 2];
    const float hid = wide(p.prehid[here * DETER + at]) * hid_inverse;
    const int gate = group * 3 * WIDTH + slice * COLUMNS + column;
    const u16* gates = p.gates + here * (3 * DETER) + gate;
    const float reset = sigmoid(wide(gates[0])), candidate = wide(gates[WIDTH]);
    const float update = sigmoid(wide(gates[2 * WIDTH]) - 1.f);
    const float obs_inverse = p.inverse[spot * 4 + 3];
    const float obs = wide(p.preobs[spot * UNITS + tid]) * obs_inverse;
    const float in0_inverse = p.inverse[spot * 4],
                in1_inverse = p.inverse[spot * 4 + 1];
    const float in0 = wide(p.pre0[spot * UNITS + tid]) * in0_inverse;
    const float in1 = wide(p.pre1[spot * UNITS + tid]) * in1_inverse;
    const u16* prehid = p.prehid + group * WIDTH + window;
    const Fragment h = fragment(*(const uint4*)(prehid + above * DETER),
                                *(const uint4*)(prehid + below * DETER));
    const float upper_inverse = p.inverse[above * 4 + 2];
    const float lower_inverse = p.inverse[below * 4 + 2];
    const bool forget = p.reset[row * length + t];
    const bool forget_mine = p.reset[mine * length + t];
    const bool forget_upper = p.reset[upper * length + t];
    const bool forget_lower = p.reset[lower * length + t];

    look_ahead(t - 1);
    if (t > 0 && lane % 16 == 0) {  // 16 neighbours share what one of them fetches
      const int then = here - ROWS, at_spot = (spot - ROWS) * UNITS + tid;
      prefetch(p.from_deters + (row * length + t - 1) * DETER + at);
      prefetch(p.deter + then * DETER + at);
      prefetch(p.prehid + then * DETER + at);
      UNROLL for (int m = 0; m < 3; m++)
        prefetch(p.gates + then * (3 * DETER) + gate + m * WIDTH);
      prefetch(p.preobs + at_spot);
      prefetch(p.pre0 + at_spot);
      prefetch(p.pre1 + at_spot);
    }

    // ---- posterior
    {
      const float* shares = p.obs_shares + (t * ROWS + mine) * PARTS * UNITS + tid;
      u32 v[8];
      look8(v, shares, UNITS);
      await8(v, shares, UNITS);
      float x = total8(v) * silu_slope(obs * obs_scale);
      sum_obs_scale += x * obs;
      x *= obs_scale;
      float product = lane_sum<32>(x * obs);
      if (lane == 0) warp_sums[warp] = product;
      __syncthreads();
      x = obs_inverse * (x - obs * sum8(warp_sums) * (1.f / UNITS));
      float next = __shfl_down_sync(~0u, x, 1);
      if (warp == part && !(tid & 1))
        store1(p.to_obs + spot * UNITS + tid, pack(x, next));
    }

    // ---- gates
    {
      float c[2][4] = {};
      if (t + 1 < length) {
        Fragment x = await(p.to_in0 + (above + ROWS) * UNITS + window, 8 * UNITS);
        UNROLL for (int i = 0; i < 4; i++) {
          if (forgot_upper) x.w[i] = 0;
          if (forgot_lower) x.w[4 + i] = 0;
        }
        multiply<2>(c, x, w_in0);
      }
      Fragment x = await(p.to_obs + above * UNITS + window, 8 * UNITS);
      multiply<2>(c, x, w_obs);
      deposit<2, SMALL>(deter_sums, warp, lane, c);
      __syncthreads();
      float grad = carry + from_deter + collect<SMALL>(deter_sums, row, column);
      float fresh = tanh_(reset * candidate);
      float inside = grad * update * (1.f - fresh * fresh);
      float to_update = rounded(grad * (fresh - deter) * update * (1.f - update));
      float to_candidate = rounded(inside * reset);
      float to_reset = rounded(inside * candidate * reset * (1.f - reset));
      carry = grad * (1.f - update);
      u16* to = p.to_gates + here * (3 * DETER) + gate;
      publish(to, column, to_reset);
      publish(to + WIDTH, column, to_candidate);
      publish(to + 2 * WIDTH, column, to_update);
      sum_reset += to_reset;
      sum_candidate += to_candidate;
      sum_update += to_update;
    }

    // ---- hidden
    float to_hid;
    {
      const u16* to = p.to_gates + above * (3 * DETER) + group * 3 * WIDTH + window;
      constexpr int down = 8 * 3 * DETER;
      uint4 v[6];
      UNROLL for (int m = 0; m < 6; m++) v[m] = load4(to + m / 2 * WIDTH + m % 2 * down);
      Spin spin;
      while (true) {
        bool waiting = false;
        UNROLL for (int m = 0; m < 6; m++) waiting |= empty(v[m]);
        if (!waiting) break;
        spin();
        UNROLL for (int m = 0; m < 6; m++)
          if (empty(v[m])) v[m] = load4(to + m / 2 * WIDTH + m % 2 * down);
      }
      __syncwarp();
      float c[2][4] = {};
      UNROLL for (int m = 0; m < 3; m++)
        multiply<2>(c, fragment(v[2 * m], v[2 * m + 1]), w_gru[m]);
      deposit<2, SMALL>(hid_sums, warp, lane, c);
      __syncthreads();
      float x = collect<SMALL>(hid_sums, row, column) * silu_slope(hid * hid_scale);
      sum_hid_scale += x * hid;
      to_hid = rounded(x * hid_scale);
      publish(p.before_norm + here * DETER + at, column, to_hid);
      float product = lane_sum<16>(to_hid * hid);
      if (column == 0) add_share<40>(p.products + (t * ROWS + row) * LINE, product);
    }
    prepare();

    // ---- inputs
    {
      if (tid < ROWS)
        row_mean[tid] =
            await_total<40>(p.products + (t * ROWS + tid) * LINE) * (1.f / DETER);
      Fragment x =
          await(p.before_norm + above * DETER + group * WIDTH + window, 8 * DETER);
      __syncthreads();
      to_hid = rounded(hid_inverse * (to_hid - hid * row_mean[row]));
      sum_hid_bias += to_hid;
      float a = row_mean[upper] * upper_inverse, b = row_mean[lower] * lower_inverse;
      UNROLL for (int i = 0; i < 4; i++) {
        x.w[i] = pack(upper_inverse * (low(x.w[i]) - low(h.w[i]) * a),
                      upper_inverse * (high(x.w[i]) - high(h.w[i]) * a));
        x.w[4 + i] = pack(lower_inverse * (low(x.w[4 + i]) - low(h.w[4 + i]) * b),
                          lower_inverse * (high(x.w[4 + i]) - high(h.w[4 + i]) * b));
      }
      float c[4][4] = {}, d[2][4] = {};
      multiply<4>(c, x, w_in);
      multiply<2>(d, x, w_own);
      deposit<4, LARGE>(in_sums, warp, lane, c);
      deposit<2, LARGE>(in_sums, warp, lane, d, 32);
      __syncthreads();
      float2 v = collect2<LARGE>(in_sums, row, 2 * column);
      store2(p.in_shares + ((t * GROUPS + group) * ROWS + row) * BOTH + slice * 32 +
                 2 * column,
             v.x, v.y);
      carry += collect<LARGE>(in_sums, row, 32 + column);
      if (forget) carry = 0;
      p.to_hid[here * DETER + at] = narrow(to_hid);
    }

    // ---- and: dynin0 and dynin1 of one row
    {
      const float* shares = p.in_shares + (t * GROUPS * ROWS + mine) * BOTH + tid;
      u32 v0[8], v1[8];
      look8(v1, shares + UNITS, ROWS * BOTH);
      look8(v0, shares, ROWS * BOTH);
      await8(v1, shares + UNITS, ROWS * BOTH);
      await8(v0, shares, ROWS * BOTH);
      float x = total8(v0) * silu_slope(in0 * in0_scale);
      float y = total8(v1) * silu_slope(in1 * in1_scale);
      sum_in0_scale += x * in0;
      sum_in1_scale += y * in1;
      x *= in0_scale;
      y *= in1_scale;
      float a = lane_sum<32>(x * in0), b = lane_sum<32>(y * in1);
      if (lane == 0) {
        warp_sums[8 + warp] = a;
        warp_sums[16 + warp] = b;
      }
      __syncthreads();
      x = rounded(in0_inverse * (x - in0 * sum8(warp_sums + 8) * (1.f / UNITS)));
      y = rounded(in1_inverse * (y - in1 * sum8(warp_sums + 16) * (1.f / UNITS)));
      sum_in0_bias += x;
      sum_in1_bias += y;
      in1_row[tid] = narrow(y);
      float next = __shfl_down_sync(~0u, x, 1);
      if (warp == part) {
        if (!(tid & 1)) store1(p.to_in0 + spot * UNITS + tid, pack(x, next));
        p.to_in1[spot * UNITS + tid] = narrow(y);
      }
      __syncthreads();
    }
    forgot_mine = forget_mine;
    forgot_upper = forget_upper;
    forgot_lower = forget_lower;
  }

  float* sums = p.sums + row * SUMS;
  sums[SUM_HID_SCALE + at] = sum_hid_scale;
  sums[SUM_HID_BIAS + at] = sum_hid_bias;
  sums += SUM_GATES + group * 3 * WIDTH + slice * COLUMNS + column;
  sums[0] = sum_reset;
  sums[WIDTH] = sum_candidate;
  sums[2 * WIDTH] = sum_update;
  sums = p.sums + mine * SUMS;
  if (tid < OWN) sums[SUM_LOGITS + part * OWN + tid] = sum_logit;
  if (part == 0) {
    sums[SUM_IN0_SCALE + tid] = sum_in0_scale;
    sums[SUM_IN0_BIAS + tid] = sum_in0_bias;
    sums[SUM_IN1_SCALE + tid] = sum_in1_scale;
    sums[SUM_IN1_BIAS + tid] = sum_in1_bias;
    sums[SUM_OBS_SCALE + tid] = sum_obs_scale;
  }
}
