// The backward kernel: gradients of the activations, from the last step to the first.
// Names that begin with `d` are gradients. A step has six phases:
//
//   logits   din1 of the next step -> dlogits -> partial sums of dobs
//   obs      partial sums -> dobs                       waits for 8 blocks: partial sums
//   gates    dobs, din0 of the next step -> dgates      waits for all blocks: dobs, din0
//   hidden   dgates -> dhid_norm                        waits for 16 blocks: dgates
//   inputs   dhid_norm -> partial sums of [din0 | din1] waits for all blocks: row sums
//   in       partial sums -> din0, din1                 waits for all blocks: partial sums
//
// Gradients of biases and scales are summed over time in registers and stored at the end,
// one sum per row; the caller adds up the rows.

struct BackwardArguments : ScanWeights, SavedActivations {
  const u8* is_first;
  // incoming gradients, (row, time, width)
  const bf16 *grad_deter, *grad_stoch, *grad_logits;
  // results that blocks also exchange, (time, row, width); dhid_norm is the gradient of
  // the normalized values of hid, before the scale
  bf16 *dobs, *din0, *dgates, *dhid_norm;
  // only for exchange between blocks, (time, ...)
  float *obs_partials, *input_partials;
  u64* product_sums;
  // other results
  bf16 *din1, *dhid, *dlogits;
  float* vector_sums;  // (row, SUMS)
  int length, obs_stride;
  float unimix;
};

// positions of the fields of `VectorGrads` in a row of vector_sums
constexpr int SUM_HID_SCALE = 0, SUM_HID_BIAS = DETER, SUM_GATES = 2 * DETER;
constexpr int SUM_IN0_SCALE = 5 * DETER, SUM_IN0_BIAS = SUM_IN0_SCALE + UNITS;
constexpr int SUM_IN1_SCALE = SUM_IN0_BIAS + UNITS,
              SUM_IN1_BIAS = SUM_IN1_SCALE + UNITS;
constexpr int SUM_OBS_SCALE = SUM_IN1_BIAS + UNITS, SUM_LOGITS = SUM_OBS_SCALE + UNITS;
constexpr int SUMS = SUM_LOGITS + LOGITS;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    scan_backward(BackwardArguments p) {
  constexpr int PITCH = 24, INPUT_PITCH = 56;  // row strides of the warps' sums
  extern __shared__ __align__(16) float dynamic[];
  float* deter_sums = dynamic;                          // WARPS * ROWS * PITCH
  float* hid_sums = deter_sums + WARPS * ROWS * PITCH;  // WARPS * ROWS * PITCH
  float* input_sums = hid_sums + WARPS * ROWS * PITCH;     // WARPS * ROWS * INPUT_PITCH
  __shared__ float row_mean[ROWS], warp_sums[24], stoch_grads[OWN_LOGITS];
  __shared__ __align__(16) bf16 in1_row[UNITS], logit_row[OWN_LOGITS];

  THREAD_INDICES;  // defines tid, row, column, ...; see exchange.cu

  // ---- load this thread's weights, indexed as in the forward kernel; the matrices are
  // transposed
  u32 w_obs[2][2][2], w_in0[2][2][2], w_gru[3][2][2][2], w_deter[2][2][2], w_in[2][4][2];
  u32 w_in1[8][2][2], w_logit[2][2][4][2];
  UNROLL for (int half = 0; half < 2; half++)
    UNROLL for (int e = 0; e < 2; e++) {
      int input = 8 * quad + 4 * half + 2 * e, k = 32 * warp + input;
      UNROLL for (int n = 0; n < 2; n++) {
        int unit = slice * COLUMNS + n * 8 + upper, deter = gru_block * WIDTH + unit;
        w_obs[half][n][e] =
            load_column_pair(p.obs_weight + k * p.obs_stride + deter, p.obs_stride);
        w_in0[half][n][e] = load_column_pair(p.in0_weight + k * DETER + deter, DETER);
        UNROLL for (int m = 0; m < 3; m++)
          w_gru[m][half][n][e] =
              load_row_pair(p.gru_weight + deter * (3 * WIDTH) + m * WIDTH + k);
        w_deter[half][n][e] = load_row_pair(p.hid_weight + (hid_row + unit) * WIDTH + k);
      }
      UNROLL for (int n = 0; n < 4; n++)
        w_in[half][n][e] = load_row_pair(
            p.hid_weight + (hid_row + WIDTH + slice * 32 + n * 8 + upper) * WIDTH + k);
      UNROLL for (int m = 0; m < 8; m++)
        w_in1[m][half][e] =
            load_column_pair(p.in1_weight + (32 * m + input) * LOGITS +
                                 row_block * OWN_LOGITS + warp * 8 + upper,
                             LOGITS);
      UNROLL for (int m = 0; m < 2; m++)
        UNROLL for (int n = 0; n < 4; n++)
          w_logit[m][half][n][e] = load_column_pair(
              p.logit_weight + (row_block * OWN_LOGITS + 32 * m + input) * UNITS +
                  32 * warp + n * 8 + upper,
              UNITS);
    }
  const float in0_scale = p.in0_scale[tid], in1_scale = p.in1_scale[tid];
  const float obs_scale = p.obs_scale[tid], hid_scale = p.hid_scale[out_column];

  float ddeter = 0;  // gradient of prev_deter of the next step, for this thread's column
  float sum_hid_scale = 0, sum_hid_bias = 0, sum_reset = 0, sum_candidate = 0;
  float sum_update = 0, sum_in0_scale = 0, sum_in0_bias = 0, sum_in1_scale = 0;
  float sum_in1_bias = 0, sum_obs_scale = 0, sum_logit = 0;
  // is_first of the next step, in the rows own_row, upper and lower
  bool next_first_own = false, next_first_upper = false, next_first_lower = false;
  in1_row[tid] = 0;

  // logits of the previous time step are loaded, and their probabilities computed, while
  // this block waits for others
  bf16 loaded_grad_logit = 0, loaded_grad_stoch = 0, loaded_logit = 0;
  float prob = 0, grad_stoch = 0, grad_logit = 0;
  auto load_logits = [&](int t) {
    if (warp >= OWN_LOGITS / 32 || t < 0) return;
    int grad_index = (own_row * length + t) * LOGITS + own_logit;
    loaded_logit = p.logits[(t * ROWS + own_row) * LOGITS + own_logit];
    loaded_grad_stoch = p.grad_stoch[grad_index];
    loaded_grad_logit = p.grad_logits[grad_index];
  };
  auto compute_probs = [&]() {
    if (warp >= OWN_LOGITS / 32) return;
    grad_stoch = to_float(loaded_grad_stoch);
    grad_logit = to_float(loaded_grad_logit);
    float logit = to_float(loaded_logit);
    prob = __expf(logit - lane_max16(logit));
    prob = __fdividef(prob, lane_sum<CLASSES>(prob));
  };
  load_logits(length - 1);
  compute_probs();
  __syncthreads();

  for (int t = length - 1; t >= 0; t--) {
    // indices of (time, row)
    const int at_row = t * ROWS + row, at_own = t * ROWS + own_row;
    const int at_upper = t * ROWS + upper, at_lower = t * ROWS + lower;

    // ---- logits
    {
      float c[4][4] = {};
      UNROLL for (int m = 0; m < 8; m++)
        multiply_row(c[m % 4], *(const uint4*)(in1_row + 32 * m + 8 * quad), w_in1[m]);
      if (upper == 0)
        *(float2*)(stoch_grads + warp * 8 + 2 * quad) =
            make_float2(c[0][0] + c[1][0] + c[2][0] + c[3][0],
                        c[0][1] + c[1][1] + c[2][1] + c[3][1]);
      __syncthreads();
      if (warp < OWN_LOGITS / 32) {
        float grad = (next_first_own ? 0.f : stoch_grads[tid]) + grad_stoch;
        float mean = lane_sum<CLASSES>(prob * grad);
        bf16 value = to_bf16(grad_logit + (1.f - p.unimix) * prob * (grad - mean));
        logit_row[tid] = value;
        sum_logit += to_float(value);
        p.dlogits[at_own * LOGITS + own_logit] = value;
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
          store2(p.obs_partials + (at_own * ROW_BLOCKS + row_block) * UNITS + 32 * warp +
                     n * 8 + 2 * quad,
                 d[n][0], d[n][1]);
    }
    // load everything else that this step needs before the first wait
    const float grad_deter =
        to_float(p.grad_deter[(row * length + t) * DETER + out_column]);
    const float prev_deter = to_float(p.prev_deter[at_row * DETER + out_column]);
    const float hid_inv_rms = p.inv_rms[at_row * 4 + 2];
    const float hid = to_float(p.hid_pre[at_row * DETER + out_column]) * hid_inv_rms;
    const int gate = gru_block * 3 * WIDTH + block_column;
    const bf16* gates = p.gates + at_row * (3 * DETER) + gate;
    const float reset = sigmoid(to_float(gates[0])), candidate = to_float(gates[WIDTH]);
    const float update = sigmoid(to_float(gates[2 * WIDTH]) - 1.f);
    const float obs_inv_rms = p.inv_rms[at_own * 4 + 3];
    const float obs = to_float(p.obs_pre[at_own * UNITS + tid]) * obs_inv_rms;
    const float in0_inv_rms = p.inv_rms[at_own * 4],
                in1_inv_rms = p.inv_rms[at_own * 4 + 1];
    const float in0 = to_float(p.in0_pre[at_own * UNITS + tid]) * in0_inv_rms;
    const float in1 = to_float(p.in1_pre[at_own * UNITS + tid]) * in1_inv_rms;
    const bf16* hid_pre = p.hid_pre + block_input;
    const Fragment h = fragment(*(const uint4*)(hid_pre + at_upper * DETER),
                                *(const uint4*)(hid_pre + at_lower * DETER));
    const float upper_inv_rms = p.inv_rms[at_upper * 4 + 2];
    const float lower_inv_rms = p.inv_rms[at_lower * 4 + 2];
    const bool first_here = p.is_first[row * length + t];
    const bool first_own = p.is_first[own_row * length + t];
    const bool first_upper = p.is_first[upper * length + t];
    const bool first_lower = p.is_first[lower * length + t];

    load_logits(t - 1);
    if (t > 0 && lane % 16 == 0) {  // for all 16 lanes that share a cache line
      const int prev_row = at_row - ROWS, prev_own = (at_own - ROWS) * UNITS + tid;
      prefetch(p.grad_deter + (row * length + t - 1) * DETER + out_column);
      prefetch(p.prev_deter + prev_row * DETER + out_column);
      prefetch(p.hid_pre + prev_row * DETER + out_column);
      UNROLL for (int m = 0; m < 3; m++)
        prefetch(p.gates + prev_row * (3 * DETER) + gate + m * WIDTH);
      prefetch(p.obs_pre + prev_own);
      prefetch(p.in0_pre + prev_own);
      prefetch(p.in1_pre + prev_own);
    }

    // ---- obs
    {
      const float* partials = p.obs_partials + at_own * ROW_BLOCKS * UNITS + tid;
      u32 v[8];
      load8(v, partials, UNITS);
      wait8(v, partials, UNITS);
      float x = sum_loaded8(v) * silu_grad(obs * obs_scale);
      sum_obs_scale += x * obs;
      x *= obs_scale;
      float product = lane_sum<32>(x * obs);
      if (lane == 0) warp_sums[warp] = product;
      __syncthreads();
      x = obs_inv_rms * (x - obs * sum8(warp_sums) * (1.f / UNITS));
      float next = __shfl_down_sync(~0u, x, 1);
      if (warp == row_block && !(tid & 1))
        store1(p.dobs + at_own * UNITS + tid, pack(x, next));
    }

    // ---- gates
    {
      float c[2][4] = {};
      if (t + 1 < length) {
        Fragment x =
            wait_fragment(p.din0 + (at_upper + ROWS) * UNITS + input_column, 8 * UNITS);
        clear_rows(x, next_first_upper, next_first_lower);
        multiply<2>(c, x, w_in0);
      }
      Fragment x = wait_fragment(p.dobs + at_upper * UNITS + input_column, 8 * UNITS);
      multiply<2>(c, x, w_obs);
      store_warp_sums<2, PITCH>(deter_sums, warp, lane, c);
      __syncthreads();
      float grad = ddeter + grad_deter + sum_warps<PITCH>(deter_sums, row, column);
      float activated = tanh_(reset * candidate);
      float dtanh = grad * update * (1.f - activated * activated);
      float dgate = grad * (activated - prev_deter);
      float dupdate = rounded(dgate * update * (1.f - update));
      float dcandidate = rounded(dtanh * reset);
      float dreset = rounded(dtanh * candidate * reset * (1.f - reset));
      ddeter = grad * (1.f - update);
      bf16* dgates = p.dgates + at_row * (3 * DETER) + gate;
      store_pair(dgates, column, dreset);
      store_pair(dgates + WIDTH, column, dcandidate);
      store_pair(dgates + 2 * WIDTH, column, dupdate);
      sum_reset += dreset;
      sum_candidate += dcandidate;
      sum_update += dupdate;
    }

    // ---- hidden
    float dhid;
    {
      const bf16* dgates =
          p.dgates + at_upper * (3 * DETER) + gru_block * 3 * WIDTH + input_column;
      constexpr int to_lower = 8 * 3 * DETER;
      uint4 v[6];
      UNROLL for (int m = 0; m < 6; m++)
        v[m] = load4(dgates + m / 2 * WIDTH + m % 2 * to_lower);
      PollLimit limit;
      while (true) {
        bool waiting = false;
        UNROLL for (int m = 0; m < 6; m++) waiting |= is_unset(v[m]);
        if (!waiting) break;
        limit.count();
        UNROLL for (int m = 0; m < 6; m++)
          if (is_unset(v[m])) v[m] = load4(dgates + m / 2 * WIDTH + m % 2 * to_lower);
      }
      __syncwarp();
      float c[2][4] = {};
      UNROLL for (int m = 0; m < 3; m++)
        multiply<2>(c, fragment(v[2 * m], v[2 * m + 1]), w_gru[m]);
      store_warp_sums<2, PITCH>(hid_sums, warp, lane, c);
      __syncthreads();
      float x = sum_warps<PITCH>(hid_sums, row, column) * silu_grad(hid * hid_scale);
      sum_hid_scale += x * hid;
      dhid = rounded(x * hid_scale);
      store_pair(p.dhid_norm + at_row * DETER + out_column, column, dhid);
      float product = lane_sum<16>(dhid * hid);
      // the sum is a fixed-point number with 40 fractional bits
      if (column == 0)
        add_to_row_sum<40>(p.product_sums + at_row * ROW_SUM_STRIDE, product);
    }
    compute_probs();

    // ---- inputs
    {
      if (tid < ROWS)
        row_mean[tid] =
            wait_row_sum<40>(p.product_sums + (t * ROWS + tid) * ROW_SUM_STRIDE) *
            (1.f / DETER);
      Fragment x =
          wait_fragment(p.dhid_norm + at_upper * DETER + block_input, 8 * DETER);
      __syncthreads();
      dhid = rounded(hid_inv_rms * (dhid - hid * row_mean[row]));
      sum_hid_bias += dhid;
      float a = row_mean[upper] * upper_inv_rms, b = row_mean[lower] * lower_inv_rms;
      UNROLL for (int i = 0; i < 4; i++) {
        x.w[i] = pack(upper_inv_rms * (low(x.w[i]) - low(h.w[i]) * a),
                      upper_inv_rms * (high(x.w[i]) - high(h.w[i]) * a));
        x.w[4 + i] = pack(lower_inv_rms * (low(x.w[4 + i]) - low(h.w[4 + i]) * b),
                          lower_inv_rms * (high(x.w[4 + i]) - high(h.w[4 + i]) * b));
      }
      float c[4][4] = {}, d[2][4] = {};
      multiply<4>(c, x, w_in);
      multiply<2>(d, x, w_deter);
      store_warp_sums<4, INPUT_PITCH>(input_sums, warp, lane, c);
      store_warp_sums<2, INPUT_PITCH>(input_sums, warp, lane, d, 32);
      __syncthreads();
      float2 v = sum_warps2<INPUT_PITCH>(input_sums, row, 2 * column);
      store2(p.input_partials + ((t * GRU_BLOCKS + gru_block) * ROWS + row) * TWO_UNITS +
                 slice * 32 + 2 * column,
             v.x, v.y);
      ddeter += sum_warps<INPUT_PITCH>(input_sums, row, 32 + column);
      if (first_here) ddeter = 0;
      p.dhid[at_row * DETER + out_column] = to_bf16(dhid);
    }

    // ---- in: in0 and in1 of one row
    {
      const float* partials =
          p.input_partials + (t * GRU_BLOCKS * ROWS + own_row) * TWO_UNITS + tid;
      u32 v0[8], v1[8];
      load8(v1, partials + UNITS, ROWS * TWO_UNITS);
      load8(v0, partials, ROWS * TWO_UNITS);
      wait8(v1, partials + UNITS, ROWS * TWO_UNITS);
      wait8(v0, partials, ROWS * TWO_UNITS);
      float x = sum_loaded8(v0) * silu_grad(in0 * in0_scale);
      float y = sum_loaded8(v1) * silu_grad(in1 * in1_scale);
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
      x = rounded(in0_inv_rms * (x - in0 * sum8(warp_sums + 8) * (1.f / UNITS)));
      y = rounded(in1_inv_rms * (y - in1 * sum8(warp_sums + 16) * (1.f / UNITS)));
      sum_in0_bias += x;
      sum_in1_bias += y;
      in1_row[tid] = to_bf16(y);
      float next = __shfl_down_sync(~0u, x, 1);
      if (warp == row_block) {
        if (!(tid & 1)) store1(p.din0 + at_own * UNITS + tid, pack(x, next));
        p.din1[at_own * UNITS + tid] = to_bf16(y);
      }
      __syncthreads();
    }
    next_first_own = first_own;
    next_first_upper = first_upper;
    next_first_lower = first_lower;
  }

  float* sums = p.vector_sums + row * SUMS;
  sums[SUM_HID_SCALE + out_column] = sum_hid_scale;
  sums[SUM_HID_BIAS + out_column] = sum_hid_bias;
  sums += SUM_GATES + gru_block * 3 * WIDTH + block_column;
  sums[0] = sum_reset;
  sums[WIDTH] = sum_candidate;
  sums[2 * WIDTH] = sum_update;
  sums = p.vector_sums + own_row * SUMS;
  if (tid < OWN_LOGITS) sums[SUM_LOGITS + own_logit] = sum_logit;
  if (row_block == 0) {
    sums[SUM_IN0_SCALE + tid] = sum_in0_scale;
    sums[SUM_IN0_BIAS + tid] = sum_in0_bias;
    sums[SUM_IN1_SCALE + tid] = sum_in1_scale;
    sums[SUM_IN1_BIAS + tid] = sum_in1_bias;
    sums[SUM_OBS_SCALE + tid] = sum_obs_scale;
  }
}
