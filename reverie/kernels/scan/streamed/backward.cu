// The five backward kernels of one step. Names that begin with `d` are gradients; those
// that end with `norm` are gradients of the output of an RMS norm. `own` is a row of the
// batch, `base` and `after` are the first rows of this and the next step in activations,
// and `input_index` is an index of incoming gradients. `starts_next` is true if the next
// step is the first of an episode, or if there is none.

struct BackwardArguments : ScanWeights, SavedActivations {
  // copies of weights in which the weights of one output of the backward pass are
  // contiguous; in0_obs_columns has one row per unit of deter: weights of in0, then of obs
  const bf16 *in1_columns, *logit_columns, *in0_obs_columns;
  // incoming gradients, (row, time, width)
  const bf16 *grad_deter, *grad_stoch, *grad_logits;
  const u8* is_first;
  bf16 *dlogits, *dgates, *dobs_norm, *dhid_norm, *din_norm;
  float* ddeter;  // (row, DETER), passed from step to step
  // passed between kernels: partial sums, (row, tile)
  float *in0_partials, *in1_partials, *hid_partials, *obs_partials;
  int t, length, batch;
  float unimix;
};

// Gradients of a norm's output, and the inputs of the norm.
struct NormGradInput {
  Fragment dnorm, pre;
};
// Returns the gradient of a norm's input. `mean` is the mean over the row of
// output gradient * scale * normalized input.
DEVICE Fragment norm_grad(NormGradInput in, const float* scale, float2 inv_rms,
                          float2 mean) {
  Fragment grad = in.dnorm, x = in.pre;
  float gain[8];
  load_scales8(gain, scale);
  UNROLL for (int i = 0; i < 4; i++) {
    float a = mean.x * inv_rms.x, b = mean.y * inv_rms.y;
    grad.w[i] =
        pack(inv_rms.x * (low(grad.w[i]) * gain[2 * i] - low(x.w[i]) * a),
             inv_rms.x * (high(grad.w[i]) * gain[2 * i + 1] - high(x.w[i]) * a));
    grad.w[4 + i] = pack(
        inv_rms.y * (low(grad.w[4 + i]) * gain[2 * i] - low(x.w[4 + i]) * b),
        inv_rms.y * (high(grad.w[4 + i]) * gain[2 * i + 1] - high(x.w[4 + i]) * b));
  }
  return grad;
}

// Converts the gradient of an activation to the gradient of the norm's output.
struct NormOutputGrad {
  float2 normed, scale;
  DEVICE NormOutputGrad(const bf16* pre, const float* scales, const float* inv_rms,
                        bool exists) {
    normed = scale = zero2();
    if (!exists) return;
    normed = load_two(pre);
    scale = load_two(scales);
    const float inv = load_float(inv_rms);
    normed = make_float2(normed.x * inv, normed.y * inv);
  }
  // Stores the gradient, and the tile's partial sum for the `mean` of `norm_grad`.
  template <int LANES>
  DEVICE void store(float2 x, bf16* dnorm, float* partial, bool exists) const {
    x = rounded(make_float2(x.x * silu_grad(normed.x * scale.x),
                            x.y * silu_grad(normed.y * scale.y)));
    if (exists) store_two(dnorm, x);
    float product = x.x * scale.x * normed.x + x.y * scale.y * normed.y;
    product = lane_sum<LANES>(exists ? product : 0);
    if (exists && threadIdx.x % LANES == 0) *partial = product;
  }
};

// Computes the gradient of a norm's output for N of its F columns. `inputs` are the
// gradients of the K outputs of the next layer, with a row stride of STRIDE; `which` is
// the column of this norm in inv_rms.
template <int N, int K, int F, int STRIDE>
DEVICE void store_norm_output_grad(const BackwardArguments& p, float* sums,
                                   const bf16* weights, const bf16* inputs,
                                   const bf16* pre, const float* scale, int which,
                                   bf16* dnorm, float* partials) {
  const int column = blockIdx.x * N, base = p.t * p.batch;
  Tile<N, K> product;
  auto weight = [&](int n, int k) { return weights + (column + n) * K + k; };
  product.start(weight);
  EACH_16_ROWS {
    const Output<N> out(first, p.batch);
    const int row = base + out.batch_row, at = column + out.column;
    const RowPair rows(first, p.batch);
    const NormOutputGrad norm(pre + row * F + at, scale + at,
                              p.inv_rms + row * 4 + which, out.exists);
    product.multiply_rows(sums, first > 0, weight, [&](int k) {
      return rows.load(inputs + base * STRIDE, STRIDE, k);
    });
    if (out.is_used)
      norm.store<out.LANES>(product.total(sums, out.row, out.column),
                            dnorm + row * F + at,
                            partials + out.batch_row * (F / N) + blockIdx.x, out.exists);
    __syncthreads();
  }
}

// Computes dlogits from in1 of the next step; a thread block has one categorical variable.
KERNEL backward_logits(BackwardArguments p) {
  extern __shared__ __align__(16) float sums[];
  __shared__ float means[16];
  const int tid = threadIdx.x, t = p.t, variable = blockIdx.x;
  const int base = t * p.batch, after = base + p.batch;
  const bool has_next = t + 1 < p.length;
  Tile<CLASSES, UNITS> product;
  auto weight = [&](int n, int k) {
    return p.in1_columns + (variable * CLASSES + n) * UNITS + k;
  };
  product.start(weight, has_next);
  EACH_16_ROWS {
    const int row = tid / 16, own = min(first + row, p.batch - 1);
    const int at = (base + own) * LOGITS + variable * CLASSES;
    const int input_index = (own * p.length + t) * LOGITS + variable * CLASSES;
    const bool starts_next = !has_next || p.is_first[own * p.length + t + 1];
    float2 grad[PAIRS], probs[PAIRS], grad_logits[PAIRS];
    each_class_pair([&](int i, int label) {
      grad[i] = load_two(p.grad_stoch + input_index + label);
      probs[i] = load_two(p.logits + at + label);
      grad_logits[i] = load_two(p.grad_logits + input_index + label);
    });
    if (has_next) {
      const RowPair rows(first, p.batch);
      const RowSums<UNIT_TILES> products(p.in1_partials, first, p.batch);
      const float2 inv_rms = rows.load(p.inv_rms + after * 4 + 1, 4);
      float2 mean;
      product.multiply_rows(
          sums, first > 0, weight,
          [&](int k) {
            return NormGradInput{
                rows.load(p.din_norm + after * TWO_UNITS + UNITS, TWO_UNITS, k),
                rows.load(p.in1_pre + after * UNITS, UNITS, k)};
          },
          [&] {
            products.store_mean<UNITS>(means);
            __syncthreads();
            mean = of_row_pair(means);
          },
          [&](int k, const NormGradInput& x) {
            return norm_grad(x, p.in1_scale + k, inv_rms, mean);
          });
    }
    if (!starts_next)
      each_class_pair([&](int i, int label) {
        grad[i] = add(grad[i], product.total(sums, row, label));
      });
    const float inv_total = 1.f / lane_sum<16>(exponentiate(probs));
    float mean = 0;
    each_class_pair([&](int i, int) { mean += dot(probs[i], grad[i]); });
    mean = lane_sum<16>(mean) * inv_total;
    if (first + row < p.batch)
      each_class_pair([&](int i, int label) {
        const float factor = (1.f - p.unimix) * inv_total;
        store_two(p.dlogits + at + label,
                  make_float2(
                      grad_logits[i].x + factor * probs[i].x * (grad[i].x - mean),
                      grad_logits[i].y + factor * probs[i].y * (grad[i].y - mean)));
      });
    __syncthreads();
  }
}

// Computes dobs_norm from dlogits.
KERNEL backward_obs(BackwardArguments p) {
  extern __shared__ __align__(16) float sums[];
  store_norm_output_grad<UNIT_COLUMNS, LOGITS, UNITS, LOGITS>(
      p, sums, p.logit_columns, p.dlogits, p.obs_pre, p.obs_scale, 3, p.dobs_norm,
      p.obs_partials);
}

// Computes dgates from obs, in0 of the next step and ddeter.
KERNEL backward_gates(BackwardArguments p) {
  extern __shared__ __align__(16) float sums[];
  __shared__ float means[2][16];
  const int t = p.t, base = t * p.batch, after = base + p.batch;
  const int column = blockIdx.x * BLOCK_COLUMNS;
  const int gru_block = column / WIDTH, inside = column % WIDTH;
  const bool has_next = t + 1 < p.length;
  Tile<BLOCK_COLUMNS, TWO_UNITS> product;
  auto weight = [&](int n, int k) {
    return p.in0_obs_columns + (column + n) * TWO_UNITS + k;
  };
  product.start(weight);
  EACH_16_ROWS {
    const Output<BLOCK_COLUMNS> out(first, p.batch);
    const int own = out.batch_row, row = base + own, at = column + out.column;
    const int gate =
        row * (3 * DETER) + gru_block * 3 * WIDTH + inside + out.column;
    const RowPair rows(first, p.batch);
    const RowSums<UNIT_TILES> in0_products(p.in0_partials, first, p.batch);
    const RowSums<UNIT_TILES> obs_products(p.obs_partials, first, p.batch);
    const float2 obs_inv_rms = rows.load(p.inv_rms + base * 4 + 3, 4);
    const float2 in0_inv_rms = has_next ? rows.load(p.inv_rms + after * 4, 4) : zero2();
    const bool starts_upper = !has_next || p.is_first[rows.upper * p.length + t + 1];
    const bool starts_lower = !has_next || p.is_first[rows.lower * p.length + t + 1];
    // r, c and u: reset gate, candidate and update gate before their activations
    float2 grad = zero2(), r = zero2(), c = zero2(), u = zero2(), prev_deter = zero2();
    float* ddeter = p.ddeter + own * DETER + at;
    if (out.exists) {
      grad = load_two(p.grad_deter + (own * p.length + t) * DETER + at);
      r = load_two(p.gates + gate);
      c = load_two(p.gates + gate + WIDTH);
      u = load_two(p.gates + gate + 2 * WIDTH);
      prev_deter = load_two(p.prev_deter + row * DETER + at);
      grad = add(grad, load_two(ddeter));
    }
    float2 mean[2];
    product.multiply_rows(
        sums, first > 0, weight,
        [&](int k) {
          if (k >= UNITS)
            return NormGradInput{
                rows.load(p.dobs_norm + base * UNITS, UNITS, k - UNITS),
                rows.load(p.obs_pre + base * UNITS, UNITS, k - UNITS)};
          if (!has_next) return NormGradInput{};
          return NormGradInput{rows.load(p.din_norm + after * TWO_UNITS, TWO_UNITS, k),
                               rows.load(p.in0_pre + after * UNITS, UNITS, k)};
        },
        [&] {
          in0_products.store_mean<UNITS>(means[0]);
          obs_products.store_mean<UNITS>(means[1]);
          __syncthreads();
          UNROLL for (int m = 0; m < 2; m++) mean[m] = of_row_pair(means[m]);
        },
        [&](int k, const NormGradInput& x) {
          if (k >= UNITS)
            return norm_grad(x, p.obs_scale + k - UNITS, obs_inv_rms, mean[1]);
          Fragment y =
              has_next ? norm_grad(x, p.in0_scale + k, in0_inv_rms, mean[0]) : Fragment{};
          clear_rows(y, starts_upper, starts_lower);
          return y;
        });
    if (out.exists) {
      float2 dreset, dcandidate, dupdate;
      grad = add(grad, product.total(sums, out.row, out.column));
      // returns the gradient of the previous deter
      auto gru_grad = [](float grad, float r, float c, float u, float prev_deter,
                         float& dreset, float& dcandidate, float& dupdate) {
        r = sigmoid(r);
        u = sigmoid(u - 1.f);
        float candidate = tanh_(r * c);
        float dtanh = grad * u * (1.f - candidate * candidate);
        dreset = dtanh * c * r * (1.f - r);
        dcandidate = dtanh * r;
        dupdate = grad * (candidate - prev_deter) * u * (1.f - u);
        return grad * (1.f - u);
      };
      float a = gru_grad(grad.x, r.x, c.x, u.x, prev_deter.x, dreset.x, dcandidate.x,
                         dupdate.x);
      float b = gru_grad(grad.y, r.y, c.y, u.y, prev_deter.y, dreset.y, dcandidate.y,
                         dupdate.y);
      store_two(p.dgates + gate, dreset);
      store_two(p.dgates + gate + WIDTH, dcandidate);
      store_two(p.dgates + gate + 2 * WIDTH, dupdate);
      *(float2*)ddeter = make_float2(a, b);
    }
    __syncthreads();
  }
}

// Computes dhid_norm from dgates.
KERNEL backward_hidden(BackwardArguments p) {
  extern __shared__ __align__(16) float sums[];
  const int gru_block = blockIdx.x * BLOCK_COLUMNS / WIDTH;
  store_norm_output_grad<BLOCK_COLUMNS, 3 * WIDTH, DETER, 3 * DETER>(
      p, sums, p.gru_weight, p.dgates + gru_block * 3 * WIDTH, p.hid_pre, p.hid_scale, 2,
      p.dhid_norm, p.hid_partials);
}

// Multiplies the gradient of hid_pre, starting at its column `from`, with weights.
template <int N, int K, class Weight>
DEVICE void multiply_dhid(const BackwardArguments& p, Tile<N, K>& product, float* sums,
                          float* means, int first, Weight weight, const RowPair& rows,
                          const RowSums<BLOCK_TILES>& products, int from) {
  const int base = p.t * p.batch;
  const float2 inv_rms = rows.load(p.inv_rms + base * 4 + 2, 4);
  float2 mean;
  product.multiply_rows(
      sums, first > 0, weight,
      [&](int k) {
        return NormGradInput{rows.load(p.dhid_norm + base * DETER, DETER, from + k),
                             rows.load(p.hid_pre + base * DETER, DETER, from + k)};
      },
      [&] {
        products.store_mean<DETER>(means);
        __syncthreads();
        mean = of_row_pair(means);
      },
      [&](int k, const NormGradInput& x) {
        return norm_grad(x, p.hid_scale + from + k, inv_rms, mean);
      });
}

// Computes gradients of the inputs of `hid`: the first thread blocks compute din_norm, the
// others add the contribution of `hid` to ddeter.
KERNEL backward_inputs(BackwardArguments p) {
  extern __shared__ __align__(16) float sums[];
  __shared__ float means[16];
  const int t = p.t, base = t * p.batch;
  constexpr int WEIGHT_ROWS = WIDTH + SHARED_INPUT;  // of one block of hid_weight
  if (blockIdx.x < TWO_UNITS / UNIT_COLUMNS) {
    const int unit = blockIdx.x * UNIT_COLUMNS, is_in1 = unit >= UNITS;
    Tile<UNIT_COLUMNS, DETER> product;
    auto weight = [&](int n, int k) {
      const int row = k / WIDTH * WEIGHT_ROWS + WIDTH + unit + n;
      return p.hid_weight + row * WIDTH + k % WIDTH;
    };
    product.start(weight);
    EACH_16_ROWS {
      const Output<UNIT_COLUMNS> out(first, p.batch);
      const int at = unit - is_in1 * UNITS + out.column;
      const int own = out.batch_row, row = base + own;
      const RowPair rows(first, p.batch);
      const RowSums<BLOCK_TILES> products(p.hid_partials, first, p.batch);
      const NormOutputGrad norm((is_in1 ? p.in1_pre : p.in0_pre) + row * UNITS + at,
                                (is_in1 ? p.in1_scale : p.in0_scale) + at,
                                p.inv_rms + row * 4 + is_in1, out.exists);
      multiply_dhid(p, product, sums, means, first, weight, rows, products, 0);
      if (out.is_used)
        norm.store<out.LANES>(product.total(sums, out.row, out.column),
                              p.din_norm + row * TWO_UNITS + unit + out.column,
                              (is_in1 ? p.in1_partials : p.in0_partials) +
                                  own * UNIT_TILES + at / UNIT_COLUMNS,
                              out.exists);
      __syncthreads();
    }
  } else {
    const int column = (blockIdx.x - TWO_UNITS / UNIT_COLUMNS) * BLOCK_COLUMNS;
    const int gru_block = column / WIDTH;
    Tile<BLOCK_COLUMNS, WIDTH> product;
    auto weight = [&](int n, int k) {
      return p.hid_weight + (gru_block * WEIGHT_ROWS + column % WIDTH + n) * WIDTH + k;
    };
    product.start(weight);
    EACH_16_ROWS {
      const Output<BLOCK_COLUMNS> out(first, p.batch);
      const RowPair rows(first, p.batch);
      const RowSums<BLOCK_TILES> products(p.hid_partials, first, p.batch);
      float* ddeter = p.ddeter + out.batch_row * DETER + column + out.column;
      const bool is_first = out.exists && p.is_first[out.batch_row * p.length + t];
      float2 sum = zero2();
      if (out.exists) sum = load_two(ddeter);
      multiply_dhid(p, product, sums, means, first, weight, rows, products,
                    gru_block * WIDTH);
      if (out.exists) {
        float2 x = add(sum, product.total(sums, out.row, out.column));
        *(float2*)ddeter = is_first ? zero2() : x;
      }
      __syncthreads();
    }
  }
}
