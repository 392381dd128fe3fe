// The forward kernel. A step has five phases. The table lists their inputs -> outputs,
// and which values of which thread blocks they wait for:
//
//   hidden   in0, in1 -> hid_pre                    waits for all blocks: in0, in1
//   gates    hid_act -> gates -> new deter          waits for all blocks: row sums
//   inputs   deter -> partial sums of [in0 | obs]   waits for 16 blocks: deter
//   logits   partial sums -> obs -> logits, sample  waits for all blocks: partial sums
//   in1      sample -> in1 of the next step         waits for 8 blocks: samples

struct ForwardArguments : ScanWeights, SavedActivations {
  // inputs, (row, time, width)
  const bf16 *projected_actions, *tokens;
  const float* noise;
  const u8* is_first;
  // only for exchange between blocks, (time, ...)
  float* input_partials;
  u64* square_sums;
  u32* samples;
  int length, obs_stride;  // time steps; row stride of obs_weight
  float eps, unimix;
};

// Returns the sum of the squares of 8 numbers.
DEVICE float squares8(const u32* w) {
  float s = 0;
  UNROLL for (int i = 0; i < 4; i++)
    s += low(w[i]) * low(w[i]) + high(w[i]) * high(w[i]);
  return s;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    scan_forward(ForwardArguments p) {
  constexpr int HID = 24, GATES = 56, INPUTS = 40;  // row strides of the warps' sums
  __shared__ float hid_sums[WARPS * ROWS * HID];
  __shared__ float gate_sums[WARPS * ROWS * GATES];
  extern __shared__ __align__(16) float dynamic[];
  float* input_sums = dynamic;  // WARPS * ROWS * INPUTS
  // LOGITS x 32, with a row stride of 34 to avoid bank conflicts
  bf16* in1_columns = (bf16*)(input_sums + WARPS * ROWS * INPUTS);
  __shared__ float in1_squares[WARPS * ROWS], hid_inv_rms[ROWS], warp_squares[16];
  __shared__ float logit_sums[OWN_LOGITS];
  __shared__ __align__(16) bf16 obs_act_row[UNITS];

  THREAD_INDICES;  // defines tid, row, column, ...; see exchange.cu

  // ---- load this thread's weights. Their indices: `i` is the input of the hidden
  // layer (deter, in0 or in1), `m` a group of 32 inputs, `half` the half of a fragment,
  // `n` a group of 8 columns, and `e` a pair of inputs.
  u32 w_hid[3][2][2][2], w_gru[2][6][2], w_input[2][4][2], w_logit[8][2][2];
  UNROLL for (int half = 0; half < 2; half++)
    UNROLL for (int e = 0; e < 2; e++) {
      int k = input_column + 4 * half + 2 * e;
      UNROLL for (int n = 0; n < 2; n++)
        UNROLL for (int i = 0; i < 3; i++)
          w_hid[i][half][n][e] =
              load_column_pair(p.hid_weight + (hid_row + i * UNITS + k) * WIDTH +
                                   slice * COLUMNS + n * 8 + upper,
                               WIDTH);
      UNROLL for (int n = 0; n < 6; n++)
        w_gru[half][n][e] =
            load_column_pair(p.gru_weight + (gru_block * WIDTH + k) * (3 * WIDTH) +
                                 n / 2 * WIDTH + slice * COLUMNS + n % 2 * 8 + upper,
                             3 * WIDTH);
      UNROLL for (int n = 0; n < 4; n++) {
        int unit = slice * 32 + n * 8 + upper;
        const bf16* w = unit < UNITS ? p.in0_weight + unit * DETER
                                     : p.obs_weight + (unit - UNITS) * p.obs_stride;
        w_input[half][n][e] = load_row_pair(w + gru_block * WIDTH + k);
      }
      UNROLL for (int m = 0; m < 8; m++)
        w_logit[m][half][e] = load_row_pair(
            p.logit_weight + (row_block * OWN_LOGITS + warp * 8 + upper) * UNITS +
            32 * m + 8 * quad + 4 * half + 2 * e);
    }
  for (int x = tid; x < LOGITS * 32; x += THREADS)
    in1_columns[x % LOGITS * 34 + x / LOGITS] =
        p.in1_weight[(row_block * 32 + x / LOGITS) * LOGITS + x % LOGITS];
  float in1_scale[8], hid_scale[8];
  UNROLL for (int i = 0; i < 8; i++) {
    in1_scale[i] = p.in1_scale[input_column + i];
    hid_scale[i] = p.hid_scale[block_input + i];
  }
  const float in0_bias = to_float(p.in0_bias[tid]), in0_scale = p.in0_scale[tid];
  const float obs_scale = p.obs_scale[tid];
  const float logit_bias = tid < OWN_LOGITS ? to_float(p.logit_bias[own_logit]) : 0.f;
  const int in1_column = row_block * 32 + warp * 4 + lane % 2 * 2;  // two columns of in1
  const float in1_bias0 = to_float(p.in1_bias[in1_column]),
              in1_bias1 = to_float(p.in1_bias[in1_column + 1]);
  const bf16* bias = p.gru_bias + gru_block * 3 * WIDTH + block_column;
  const float reset_bias = to_float(bias[0]), candidate_bias = to_float(bias[WIDTH]);
  const float update_bias = to_float(bias[2 * WIDTH]);

  // ---- the state before the first step
  float prev_deter = to_float(p.prev_deter[row * DETER + out_column]);
  float acc[2][4] = {};  // accumulators of the hidden layer
  {
    const bf16* deter = p.prev_deter + upper * DETER + block_input;
    multiply<2>(acc, fragment(load4(deter), load4(deter + 8 * DETER)), w_hid[0]);
  }
  // normalize in0 of one row: all thread blocks of the row compute it, each stores a part
  auto store_in0 = [&](float x, int t) {
    x = rounded(x);
    float squares = lane_sum<32>(x * x);
    if (lane == 0) warp_squares[8 + warp] = squares;
    __syncthreads();
    float inv_rms = rsqrtf(sum8(warp_squares + 8) * (1.f / UNITS) + p.eps);
    int at_own = t * ROWS + own_row;
    float y = silu(rounded(x * inv_rms * in0_scale));
    float next = __shfl_down_sync(~0u, y, 1);
    if (warp == row_block && !(tid & 1))
      store1(p.shared_input + at_own * SHARED_INPUT + tid, pack(y, next));
    if (row_block == 0) {
      p.in0_pre[at_own * UNITS + tid] = to_bf16(x);
      if (tid == 0) p.inv_rms[at_own * 4] = inv_rms;
    }
  };
  __syncthreads();
  store_in0(to_float(p.in0_pre[own_row * UNITS + tid]), 0);
  float projected = to_float(p.projected_actions[row * length * DETER + out_column]);

  for (int t = 0; t < length; t++) {
    const int next = t + 1 < length ? t + 1 : t;  // inputs are loaded one step early
    // indices of (time, row)
    const int at_row = t * ROWS + row, at_own = t * ROWS + own_row;
    const int at_upper = t * ROWS + upper, at_lower = t * ROWS + lower;

    // ---- hidden
    {
      const bf16* shared = p.shared_input + at_upper * SHARED_INPUT + input_column;
      Fragment x = wait_fragment(shared, 8 * SHARED_INPUT);
      multiply<2>(acc, x, w_hid[1]);
      x = wait_fragment(p.in1_pre + at_upper * UNITS + input_column, 8 * UNITS);
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
      store_warp_sums<2, HID>(hid_sums, warp, lane, acc);
      __syncthreads();
      float h = rounded(sum_warps<HID>(hid_sums, row, column) + projected);
      store_pair(p.hid_pre + at_row * DETER + out_column, column, h);
      float squares = lane_sum<16>(h * h);
      if (column == 0)
        add_to_row_sum<20>(p.square_sums + at_row * ROW_SUM_STRIDE, squares);
      // all thread blocks have in1; for the columns of each warp, one of them stores it
      if (block == warp * SLICES) {
        if (warp == 0 && quad == 0) {
          p.inv_rms[at_upper * 4 + 1] = a;
          p.inv_rms[at_lower * 4 + 1] = b;
        }
        bf16* out = p.shared_input + UNITS + input_column;
        store_upper(out + at_upper * SHARED_INPUT, x);
        store_lower(out + at_lower * SHARED_INPUT, x);
      }
    }
    projected = to_float(p.projected_actions[(row * length + next) * DETER + out_column]);
    const float token = to_float(p.tokens[(own_row * length + t) * UNITS + tid]);
    const float noise =
        tid < OWN_LOGITS ? p.noise[(own_row * length + t) * LOGITS + own_logit] : 1.f;
    // is_first of the next step, for each of the rows that this thread works on
    const bool first_here = p.is_first[row * length + next];
    const bool first_own = p.is_first[own_row * length + next];
    const bool first_upper = p.is_first[upper * length + next];
    const bool first_lower = p.is_first[lower * length + next];

    // ---- gates
    {
      if (tid < ROWS) {
        float total = wait_row_sum<20>(p.square_sums + (t * ROWS + tid) * ROW_SUM_STRIDE);
        float inv_rms = rsqrtf(total * (1.f / DETER) + p.eps);
        hid_inv_rms[tid] = inv_rms;
        if (block == 0) p.inv_rms[(t * ROWS + tid) * 4 + 2] = inv_rms;
      }
      Fragment x = wait_fragment(p.hid_pre + at_upper * DETER + block_input, 8 * DETER);
      __syncthreads();
      norm_silu(x.w, hid_inv_rms[upper], hid_scale);
      norm_silu(x.w + 4, hid_inv_rms[lower], hid_scale);
      float c[6][4] = {};
      multiply<6>(c, x, w_gru);
      store_warp_sums<6, GATES>(gate_sums, warp, lane, c);
      if (slice == warp) {
        bf16* out = p.hid_act + at_upper * DETER + block_input;
        store_upper(out, x);
        store_lower(out + 8 * DETER, x);
      }
      __syncthreads();
      float reset = rounded(sum_warps<GATES>(gate_sums, row, column) + reset_bias);
      float candidate =
          rounded(sum_warps<GATES>(gate_sums, row, 16 + column) + candidate_bias);
      float update =
          rounded(sum_warps<GATES>(gate_sums, row, 32 + column) + update_bias);
      float gate = sigmoid(update - 1.f);
      float deter =
          rounded(gate * tanh_(sigmoid(reset) * candidate) + (1.f - gate) * prev_deter);
      store_pair(p.deter + at_row * DETER + out_column, column, deter);
      prev_deter = first_here ? 0.f : deter;
      bf16* out = p.gates + at_row * (3 * DETER) + gru_block * 3 * WIDTH + block_column;
      out[0] = to_bf16(reset);
      out[WIDTH] = to_bf16(candidate);
      out[2 * WIDTH] = to_bf16(update);
      if (t + 1 < length)
        p.prev_deter[(at_row + ROWS) * DETER + out_column] = to_bf16(prev_deter);
    }

    // ---- inputs: this GRU block's part of in0 (of the next step) and of obs
    {
      Fragment x = wait_fragment(p.deter + at_upper * DETER + block_input, 8 * DETER);
      float c[4][4] = {};
      multiply<4>(c, x, w_input);
      store_warp_sums<4, INPUTS>(input_sums, warp, lane, c);
      __syncthreads();
      float2 v = sum_warps2<INPUTS>(input_sums, row, 2 * column);
      store2(p.input_partials + ((t * GRU_BLOCKS + gru_block) * ROWS + row) * TWO_UNITS +
                 slice * 32 + 2 * column,
             v.x, v.y);
      clear_rows(x, first_upper, first_lower);
      UNROLL for (int n = 0; n < 2; n++)
        acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
      multiply<2>(acc, x, w_hid[0]);
    }

    // ---- logits
    {
      const float* partials =
          p.input_partials + (t * GRU_BLOCKS * ROWS + own_row) * TWO_UNITS + tid;
      u32 v[8], v0[8];
      load8(v, partials + UNITS, ROWS * TWO_UNITS);
      wait8(v, partials + UNITS, ROWS * TWO_UNITS);
      load8(v0, partials, ROWS * TWO_UNITS);
      float obs = rounded(token + sum_loaded8(v));
      float squares = lane_sum<32>(obs * obs);
      if (lane == 0) warp_squares[warp] = squares;
      __syncthreads();
      float inv_rms = rsqrtf(sum8(warp_squares) * (1.f / UNITS) + p.eps);
      bf16 act = to_bf16(silu(rounded(obs * inv_rms * obs_scale)));
      obs_act_row[tid] = act;
      __syncthreads();
      float c[4][4] = {};
      UNROLL for (int m = 0; m < 8; m++)
        multiply_row(c[m % 4], *(const uint4*)(obs_act_row + 32 * m + 8 * quad),
                     w_logit[m]);
      if (upper == 0)
        *(float2*)(logit_sums + warp * 8 + 2 * quad) =
            make_float2(c[0][0] + c[1][0] + c[2][0] + c[3][0],
                        c[0][1] + c[1][1] + c[2][1] + c[3][1]);
      __syncthreads();
      if (warp < OWN_LOGITS / 32) {
        bf16 value = to_bf16(logit_sums[tid] + logit_bias);
        float logit = to_float(value), e = __expf(logit - lane_max16(logit));
        float prob =
            (1.f - p.unimix) * __fdividef(e, lane_sum<CLASSES>(e)) + p.unimix / CLASSES;
        float score = __fdividef(prob, noise), best = lane_max16(score);
        u32 winners = __ballot_sync(~0u, !(score < best)) >> (lane & CLASSES) & 0xFFFFu;
        int sample = __ffs(winners) - 1;
        if (lane % CLASSES == 0)
          store1(p.samples + (t * ROWS + own_row) * STOCH + row_block * 4 + tid / CLASSES,
                 sample);
        int logit_at = at_own * LOGITS + own_logit;
        bf16 one_hot = lane % CLASSES == sample ? 0x3F80 : 0;  // one, or zero
        p.logits[logit_at] = value;
        p.stoch[logit_at] = one_hot;
        if (t + 1 < length)
          p.prev_stoch[logit_at + ROWS * LOGITS] = first_own ? 0 : one_hot;
      }
      wait8(v0, partials, ROWS * TWO_UNITS);
      if (t + 1 < length)
        store_in0(in0_bias + (first_own ? 0.f : sum_loaded8(v0)), t + 1);
      if (row_block == 1) {
        p.obs_pre[at_own * UNITS + tid] = to_bf16(obs);
        p.obs_act[at_own * UNITS + tid] = act;
        if (tid == 0) p.inv_rms[at_own * 4 + 3] = inv_rms;
      }
    }

    // ---- in1 of the next step: the sum of the weight columns of the sampled classes
    if (t + 1 < length) {
      const int variable = lane / 2;
      const u32* samples = p.samples + at_own * STOCH + variable;
      u32 a, b;
      PollLimit limit;
      while (true) {
        a = load1(samples);
        b = load1(samples + 16);
        if (a != UNSET && b != UNSET) break;
        limit.count();
      }
      __syncwarp();
      const bf16* w = in1_columns + warp * 4 + lane % 2 * 2;
      a = load_row_pair(w + (variable * CLASSES + a) * 34);
      b = load_row_pair(w + ((variable + 16) * CLASSES + b) * 34);
      float x = low(a) + low(b), y = high(a) + high(b);
      UNROLL for (int m = 2; m < 32; m <<= 1) {
        x += __shfl_xor_sync(~0u, x, m);
        y += __shfl_xor_sync(~0u, y, m);
      }
      if (first_own) x = y = 0;
      if (lane < 2)
        store1(p.in1_pre + (at_own + ROWS) * UNITS + in1_column,
               pack(x + in1_bias0, y + in1_bias1));
    }
  }
}
