// The five forward kernels of one step; `tile.cu` defines their types, and `first`, the
// first of 16 rows. `base` is the first row of this step in activations, `own` the row of
// the batch that a thread computes (at most the last row of the batch), `at` a column or
// offset of this thread's output, and `input_index` an index of inputs (row, time).
// `inside` is the first column of the tile in its GRU block. `next_first` is is_first of
// the next step.

struct ForwardArguments : ScanWeights, SavedActivations {
  // copies of weights in which the weights of one output are contiguous; in0_obs_rows are
  // the rows of in0, then those of obs; in1_columns has one row per class
  const bf16 *hid_rows, *gru_rows, *in0_obs_rows, *in1_columns;
  // inputs, (row, time, width)
  const bf16 *projected_actions, *tokens;
  const float* noise;
  const u8* is_first;
  // passed between kernels: partial sums of squares (row, tile), and sampled classes
  float *in0_partials, *in1_partials, *hid_partials, *obs_partials;
  int* samples;
  int t, length, batch;
  float eps, unimix;
};

// Computes hid_pre from prev_deter, in0, in1 and the projected actions.
KERNEL forward_hidden(ForwardArguments p) {
  extern __shared__ __align__(16) float sums[];
  __shared__ float inv_rms[2][16];
  const int tid = threadIdx.x, tile = blockIdx.x, base = p.t * p.batch;
  const int column = tile * BLOCK_COLUMNS, gru_block = column / WIDTH;
  Tile<BLOCK_COLUMNS, HID_INPUTS> product;
  auto weight = [&](int n, int k) { return p.hid_rows + (column + n) * HID_INPUTS + k; };
  product.start(weight);
  EACH_16_ROWS {
    const Output<BLOCK_COLUMNS> out(first, p.batch);
    const int at = column + out.column;
    const RowPair rows(first, p.batch);
    const RowSums<UNIT_TILES> in0_squares(p.in0_partials, first, p.batch);
    const RowSums<IN1_TILES> in1_squares(p.in1_partials, first, p.batch);
    float2 action = zero2();
    if (out.exists)
      action = load_two(p.projected_actions +
                        (out.batch_row * p.length + p.t) * DETER + at);
    product.multiply_rows(
        sums, first > 0, weight,
        [&](int k) {
          if (k < WIDTH)
            return rows.load(p.prev_deter + base * DETER + gru_block * WIDTH, DETER, k);
          const bool is_in1 = k >= WIDTH + UNITS;
          k -= is_in1 ? WIDTH + UNITS : WIDTH;
          return rows.load((is_in1 ? p.in1_pre : p.in0_pre) + base * UNITS, UNITS, k);
        },
        [&] {
          in0_squares.store_inv_rms<UNITS>(inv_rms[0], p.eps);
          in1_squares.store_inv_rms<UNITS>(inv_rms[1], p.eps);
          __syncthreads();
        },
        [&](int k, Fragment x) {
          if (k < WIDTH) return x;
          const bool is_in1 = k >= WIDTH + UNITS;
          k -= is_in1 ? WIDTH + UNITS : WIDTH;
          x = norm_act(x, (is_in1 ? p.in1_scale : p.in0_scale) + k,
                       of_row_pair(inv_rms[is_in1]));
          if (tile == 0)
            rows.store(p.shared_input + base * SHARED_INPUT + is_in1 * UNITS + k,
                       SHARED_INPUT, first, p.batch, x);
          return x;
        });
    if (out.is_used) {
      float2 x = rounded(add(product.total(sums, out.row, out.column), action));
      if (out.exists) store_two(p.hid_pre + (base + out.batch_row) * DETER + at, x);
      float squares = lane_sum<out.LANES>(dot(x, x));
      if (out.exists && out.column == 0)
        p.hid_partials[out.batch_row * BLOCK_TILES + tile] = squares;
    }
    if (tile == 0 && tid < 16 && first + tid < p.batch) {
      p.inv_rms[(base + first + tid) * 4] = inv_rms[0][tid];
      p.inv_rms[(base + first + tid) * 4 + 1] = inv_rms[1][tid];
    }
    __syncthreads();
  }
}

// Computes the gates and the new deter.
KERNEL forward_gates(ForwardArguments p) {
  extern __shared__ __align__(16) float sums[];
  __shared__ float inv_rms[16];
  const int tid = threadIdx.x, t = p.t, tile = blockIdx.x, base = t * p.batch;
  const int column = tile * BLOCK_COLUMNS;
  const int gru_block = column / WIDTH, inside = column % WIDTH;
  Tile<3 * BLOCK_COLUMNS, WIDTH> product;
  auto weight = [&](int n, int k) {
    const int row = gru_block * 3 * WIDTH + n / BLOCK_COLUMNS * WIDTH + inside;
    return p.gru_rows + (row + n % BLOCK_COLUMNS) * WIDTH + k;
  };
  product.start(weight);
  EACH_16_ROWS {
    const Output<BLOCK_COLUMNS> out(first, p.batch);
    const int row = base + out.batch_row, at = row * DETER + column + out.column;
    const int gate = gru_block * 3 * WIDTH + inside + out.column;
    const bool has_next = out.exists && t + 1 < p.length;
    const RowPair rows(first, p.batch);
    const RowSums<BLOCK_TILES> squares(p.hid_partials, first, p.batch);
    float2 gates[3] = {}, prev_deter = zero2();
    if (out.exists) {
      UNROLL for (int m = 0; m < 3; m++)
        gates[m] = load_two(p.gru_bias + gate + m * WIDTH);
      prev_deter = load_two(p.prev_deter + at);
    }
    const bool next_first =
        has_next && p.is_first[out.batch_row * p.length + t + 1];
    product.multiply_rows(
        sums, first > 0, weight,
        [&](int k) {
          return rows.load(p.hid_pre + base * DETER, DETER, gru_block * WIDTH + k);
        },
        [&] {
          squares.store_inv_rms<DETER>(inv_rms, p.eps);
          __syncthreads();
        },
        [&](int k, Fragment x) {
          k += gru_block * WIDTH;
          x = norm_act(x, p.hid_scale + k, of_row_pair(inv_rms));
          if (inside == 0)
            rows.store(p.hid_act + base * DETER + k, DETER, first, p.batch, x);
          return x;
        });
    if (out.exists) {
      UNROLL for (int m = 0; m < 3; m++) {
        float2 x = product.total(sums, out.row, m * BLOCK_COLUMNS + out.column);
        gates[m] = rounded(add(x, gates[m]));
        store_two(p.gates + row * (3 * DETER) + gate + m * WIDTH, gates[m]);
      }
      float a = sigmoid(gates[2].x - 1.f), b = sigmoid(gates[2].y - 1.f);
      float2 deter = rounded(make_float2(
          a * tanh_(sigmoid(gates[0].x) * gates[1].x) + (1.f - a) * prev_deter.x,
          b * tanh_(sigmoid(gates[0].y) * gates[1].y) + (1.f - b) * prev_deter.y));
      store_two(p.deter + at, deter);
      if (has_next)
        store_two(p.prev_deter + at + p.batch * DETER, next_first ? zero2() : deter);
    }
    if (tile == 0 && tid < 16 && first + tid < p.batch)
      p.inv_rms[(base + first + tid) * 4 + 2] = inv_rms[tid];
    __syncthreads();
  }
}

// Computes in0_pre of the next step, and obs_pre.
KERNEL forward_inputs(ForwardArguments p) {
  extern __shared__ __align__(16) float sums[];
  const int t = p.t, base = t * p.batch, unit = blockIdx.x * UNIT_COLUMNS;
  const bool is_obs = unit >= UNITS;
  Tile<UNIT_COLUMNS, DETER> product;
  auto weight = [&](int n, int k) { return p.in0_obs_rows + (unit + n) * DETER + k; };
  product.start(weight);
  EACH_16_ROWS {
    const Output<UNIT_COLUMNS> out(first, p.batch);
    const int at = unit % UNITS + out.column, row = base + out.batch_row;
    const int input_index = out.batch_row * p.length + t;
    const bool has_next = out.exists && !is_obs && t + 1 < p.length;
    const bool next_first = has_next && p.is_first[input_index + 1];
    const RowPair rows(first, p.batch);
    float2 bias = zero2();
    if (out.exists)
      bias = load_two(is_obs ? p.tokens + input_index * UNITS + at : p.in0_bias + at);
    product.multiply_rows(sums, first > 0, weight, [&](int k) {
      return rows.load(p.deter + base * DETER, DETER, k);
    });
    if (out.is_used) {
      float2 x = product.total(sums, out.row, out.column);
      x = rounded(add(next_first ? zero2() : x, bias));
      if (out.exists && is_obs) store_two(p.obs_pre + row * UNITS + at, x);
      if (has_next) store_two(p.in0_pre + (row + p.batch) * UNITS + at, x);
      float squares = lane_sum<out.LANES>(dot(x, x));
      if (out.exists && out.column == 0)
        (is_obs ? p.obs_partials
                : p.in0_partials)[out.batch_row * UNIT_TILES + at / UNIT_COLUMNS] =
            squares;
    }
    __syncthreads();
  }
}

// Computes logits and samples; a thread block has one categorical variable.
KERNEL forward_logits(ForwardArguments p) {
  extern __shared__ __align__(16) float sums[];
  __shared__ float inv_rms[16];
  const int tid = threadIdx.x, t = p.t, variable = blockIdx.x, base = t * p.batch;
  Tile<CLASSES, UNITS> product;
  auto weight = [&](int n, int k) {
    return p.logit_weight + (variable * CLASSES + n) * UNITS + k;
  };
  product.start(weight);
  EACH_16_ROWS {
    const int row = tid / 16, own = min(first + row, p.batch - 1);
    const bool exists = first + row < p.batch, has_next = t + 1 < p.length;
    const int at = (base + own) * LOGITS + variable * CLASSES;
    const int input_index = (own * p.length + t) * LOGITS + variable * CLASSES;
    const RowPair rows(first, p.batch);
    const RowSums<UNIT_TILES> squares(p.obs_partials, first, p.batch);
    float2 probs[PAIRS], noise[PAIRS];
    each_class_pair([&](int i, int label) {
      probs[i] = load_two(p.logit_bias + variable * CLASSES + label);
      noise[i] = load_two(p.noise + input_index + label);
    });
    const bool next_first = has_next && p.is_first[own * p.length + t + 1];
    product.multiply_rows(
        sums, first > 0, weight,
        [&](int k) { return rows.load(p.obs_pre + base * UNITS, UNITS, k); },
        [&] {
          squares.store_inv_rms<UNITS>(inv_rms, p.eps);
          __syncthreads();
        },
        [&](int k, Fragment x) {
          x = norm_act(x, p.obs_scale + k, of_row_pair(inv_rms));
          if (variable == 0)
            rows.store(p.obs_act + base * UNITS + k, UNITS, first, p.batch, x);
          return x;
        });
    each_class_pair([&](int i, int label) {
      probs[i] = rounded(add(product.total(sums, row, label), probs[i]));
      if (exists) store_two(p.logits + at + label, probs[i]);
    });
    const float factor = (1.f - p.unimix) / lane_sum<16>(exponentiate(probs));
    float best = -1.f;
    int sample = 0;
    each_class_pair([&](int i, int label) {
      float a = __fdividef(probs[i].x * factor + p.unimix / CLASSES, noise[i].x);
      float b = __fdividef(probs[i].y * factor + p.unimix / CLASSES, noise[i].y);
      if (a > best) best = a, sample = label;
      if (b > best) best = b, sample = label + 1;
    });
    UNROLL for (int m = 1; m < 16; m <<= 1) {  // the lower class wins a tie
      float other_best = __shfl_xor_sync(~0u, best, m);
      int other = __shfl_xor_sync(~0u, sample, m);
      if (other_best > best || (other_best == best && other < sample))
        best = other_best, sample = other;
    }
    if (exists) {
      each_class_pair([&](int i, int label) {
        float2 one_hot = make_float2(label == sample, label + 1 == sample);
        store_two(p.stoch + at + label, one_hot);
        if (next_first) one_hot = zero2();
        if (has_next) store_two(p.prev_stoch + at + p.batch * LOGITS + label, one_hot);
      });
      if (tid % 16 == 0) p.samples[own * STOCH + variable] = sample;
    }
    if (variable == 0 && tid < 16 && first + tid < p.batch)
      p.inv_rms[(base + first + tid) * 4 + 3] = inv_rms[tid];
    __syncthreads();
  }
}

// Computes in1_pre of the next step: the sum of the weight rows of the sampled classes. A
// thread block has IN1_COLUMNS units of one row. Here, `inside` is false for lanes
// without a unit.
KERNEL forward_in1(ForwardArguments p) {
  __shared__ float2 sums[WARPS][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = blockIdx.x / IN1_TILES, tile = blockIdx.x % IN1_TILES;
  const int at = tile * IN1_COLUMNS + 2 * lane;
  const bool inside = 2 * lane < IN1_COLUMNS;
  allow_next_kernel();
  wait_previous_kernel();
  const bool next_first = p.is_first[row * p.length + p.t + 1];
  constexpr int VARIABLES_PER_WARP = (STOCH + WARPS - 1) / WARPS;
  int label[VARIABLES_PER_WARP];
  UNROLL for (int i = 0; i < VARIABLES_PER_WARP; i++) {
    const int variable = i * WARPS + warp;
    label[i] = -1;
    if (variable < STOCH && inside)
      label[i] = variable * CLASSES + (int)load_l2_1(p.samples + row * STOCH + variable);
  }
  float2 x = zero2();
  if (warp == 0 && inside) x = load_two(p.in1_bias + at);
  UNROLL for (int i = 0; i < VARIABLES_PER_WARP; i++)
    if (!next_first && label[i] >= 0) {
      u32 w = *(const u32*)(p.in1_columns + label[i] * UNITS + at);
      x = add(x, make_float2(low(w), high(w)));
    }
  sums[warp][lane] = x;
  __syncthreads();
  if (warp > 0) return;
  x = zero2();
  UNROLL for (int m = 0; m < WARPS; m++) x = add(x, sums[m][lane]);
  x = rounded(x);
  if (inside) store_two(p.in1_pre + ((p.t + 1) * p.batch + row) * UNITS + at, x);
  float squares = lane_sum<32>(dot(x, x));
  if (lane == 0) p.in1_partials[row * IN1_TILES + tile] = squares;
}
