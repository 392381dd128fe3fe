// Backward pass. It also recomputes the activation, which the gradient of the next
// layer's weights needs. Sizes, macros and shared memory are defined in common.cu and
// device.cu. `z` is the output of the norm and `dz` its gradient; `y` is first `dy`, the
// gradient of silu(z), and later `dz`.

struct Arguments {
  const bf16 *x, *bias;
  const float *scale, *shift, *stats;
  const bf16 *dy, *residual_grad;
  bf16 *out, *dx;  // dx may be the memory of dy
  float* sums;
};

KERNEL norm_backward(Arguments a) {
  SHARED_MEMORY(Scratch<3>);
  const Position position;
  start_copies({a.x, a.dy}, data, scratch.barriers, position);
  uint4* const gradients = data + SHARE / 8;  // first dy, later overwritten with dz
  const float* stats = a.stats + (size_t)position.image * 2 * CHANNELS;
  float *const means = scratch.channels[0], *const factors = scratch.channels[1];
  float* const offsets = scratch.channels[2];
  FOR_EACH_CHANNEL {
    const float mean = stats[c] - (a.bias ? to_float(a.bias[c]) : 0.f);
    const float factor = stats[CHANNELS + c] * a.scale[c];
    means[c] = mean;
    factors[c] = factor;
    offsets[c] = a.shift[c] - mean * factor;
  }
  sync_block();
  // per channel of this thread: constants of the norm, input `x`, and `dy` or `dz`
  float mean[8], factor[8], x[8], y[8];
  load8(means + position.channel, mean);
  load8(factors + position.channel, factor);
  {
    float offset[8], sums[3][8] = {};
    load8(offsets + position.channel, offset);
    for (int i = 0; i < STAGES; i++) {
      wait_barrier(scratch.barriers + i);
      UNROLL for (int n = 0; n < LOADS / STAGES; n++) {
        const int k = i * (LOADS / STAGES) + n, at = k * THREADS + threadIdx.x;
        unpack8(data[at], x);
        unpack8(gradients[at], y);
        UNROLL for (int j = 0; j < 8; j += 2) {
          const float z[2] = {x[j] * factor[j] + offset[j],
                              x[j + 1] * factor[j + 1] + offset[j + 1]};
          float gate[2];
          sigmoids(z[0], z[1], gate[0], gate[1]);
          UNROLL for (int m = 0; m < 2; m++) {
            const float difference = x[j + m] - mean[j + m];
            const float dz = y[j + m] * gate[m] * (1.f + z[m] * (1.f - gate[m]));
            sums[0][j + m] += dz;
            sums[1][j + m] += dz * difference;
            sums[2][j + m] += difference;
            x[j + m] = z[m] * gate[m];
            y[j + m] = dz;
          }
        }
        store4(a.out + position.at(k), pack8(x));
        gradients[at] = pack8(y);
      }
    }
    sum_blocks(sums, scratch, position, true);  // true: all blocks get the sums
  }
  // sums over pixels of the gradients of the normalized input, and of their products with
  // the normalized input; they reuse the memory of `scratch.warps`
  float* const output_grads = scratch.warps[0];
  float* const products = output_grads + CHANNELS;
  FOR_EACH_CHANNEL {
    output_grads[c] = total<3>(scratch.blocks[0], 0, c) * a.scale[c];
    products[c] = total<3>(scratch.blocks[0], 1, c) * stats[CHANNELS + c] * a.scale[c];
  }
  sync_block();
  float *const constants = scratch.channels[0], *const slopes = scratch.channels[2];
  FOR_EACH_CHANNEL {
    const float rstd = stats[CHANNELS + c];
    const float constant = sum_group(output_grads, c) / (PIXELS * PER_GROUP) * rstd;
    const float slope = sum_group(products, c) / (PIXELS * PER_GROUP) * rstd * rstd;
    constants[c] = constant;
    slopes[c] = slope;
    if (position.rank == 0) {
      const float dshift = total<3>(scratch.blocks[0], 0, c);
      const float difference = total<3>(scratch.blocks[0], 2, c);
      // gradients of shift and scale, sum of the gradient of `x`, sum of residual_grad
      float* to = a.sums + (size_t)position.image * 4 * CHANNELS + c;
      to[0] = dshift;
      to[CHANNELS] = total<3>(scratch.blocks[0], 1, c) * rstd;
      to[2 * CHANNELS] = dshift * factors[c] - difference * slope - PIXELS * constant;
      if (!a.residual_grad) to[3 * CHANNELS] = 0;
    }
  }
  sync_block();
  // dx = dz * factor - (x - mean) * slope - constant, where dz is the gradient of the
  // norm's output; below, `constant` includes the term with the mean
  float constant[8], slope[8], residual[1][8] = {};
  load8(constants + position.channel, constant);
  load8(slopes + position.channel, slope);
  UNROLL for (int j = 0; j < 8; j++) constant[j] -= mean[j] * slope[j];
  _Pragma("unroll 4") for (int k = 0; k < LOADS; k++) {
    const int at = k * THREADS + threadIdx.x;
    unpack8(data[at], x);
    unpack8(gradients[at], y);
    UNROLL for (int j = 0; j < 8; j++)
      x[j] = y[j] * factor[j] - x[j] * slope[j] - constant[j];
    if (a.residual_grad) {
      unpack8(load4(a.residual_grad + position.at(k)), y);
      UNROLL for (int j = 0; j < 8; j++) {
        residual[0][j] += y[j];
        x[j] += y[j];
      }
    }
    store4(a.dx + position.at(k), pack8(x));
  }
  if (a.residual_grad) {
    // the previous sums are no longer needed; `sum_blocks` waits for the other blocks
    if (CLUSTER_SIZE > 1) cluster_arrive();
    sync_block();  // `sum_blocks` overwrites `scratch.warps`
    sum_blocks(residual, scratch, position, false);  // only for the first block
    if (position.rank == 0) {
      float* to = a.sums + ((size_t)position.image * 4 + 3) * CHANNELS;
      FOR_EACH_CHANNEL to[c] = total<1>(scratch.blocks[0], 0, c);
    }
  }
}
