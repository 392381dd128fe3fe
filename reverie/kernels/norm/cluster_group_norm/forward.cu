// Forward pass. Mean and 1 / standard deviation of each channel's group are written to
// `stats`.

struct Arguments {
  const bf16 *x, *bias;
  const float *scale, *shift;
  float* stats;
  bf16* out;
  float eps;
};

KERNEL norm_forward(Arguments a) {
  SHARED_MEMORY(Scratch<2>);
  const Position position;
  start_copies({a.x}, data, scratch.barriers, position);
  // sums of differences from the first pixel, because squares of the values themselves
  // would lose the variance of almost constant maps to rounding
  float first[8], sums[2][8] = {}, x[8];
  unpack8(load4(a.x + position.map + position.channel), first);
  UNROLL for (int i = 0; i < STAGES; i++) {
    wait_barrier(scratch.barriers + i);
    UNROLL for (int k = i * LOADS / STAGES; k < (i + 1) * LOADS / STAGES; k++) {
      unpack8(data[k * THREADS + threadIdx.x], x);
      UNROLL for (int j = 0; j < 8; j++) {
        const float difference = x[j] - first[j];
        sums[0][j] += difference;
        sums[1][j] += difference * difference;
      }
    }
  }
  sum_blocks(sums, scratch, position, true);

  float *const means = scratch.channels[0], *const squares = scratch.channels[1];
  FOR_EACH_CHANNEL {
    const float sum = total<2>(scratch.blocks[0], 0, c), mean = sum / PIXELS;
    const float bias = a.bias ? to_float(a.bias[c]) : 0.f;
    means[c] = mean + to_float(a.x[position.map + c]) + bias;
    squares[c] = total<2>(scratch.blocks[0], 1, c) - sum * mean;
  }
  sync_block();
  float* const deviations = scratch.channels[2];  // squared deviations from group means
  FOR_EACH_CHANNEL {
    const float difference = means[c] - sum_group(means, c) / PER_GROUP;
    deviations[c] = squares[c] + PIXELS * difference * difference;
  }
  sync_block();
  float* const factors = scratch.warps[0];  // reuses the memory of the sums
  float* const offsets = factors + CHANNELS;
  FOR_EACH_CHANNEL {
    const float mean = sum_group(means, c) / PER_GROUP;
    const float rstd =
        inverse_sqrt(sum_group(deviations, c) / (PIXELS * PER_GROUP) + a.eps);
    if (position.rank == 0) {
      float* stats = a.stats + (size_t)position.image * 2 * CHANNELS + c;
      stats[0] = mean;
      stats[CHANNELS] = rstd;
    }
    const float factor = rstd * a.scale[c], bias = a.bias ? to_float(a.bias[c]) : 0.f;
    factors[c] = factor;
    offsets[c] = a.shift[c] - (mean - bias) * factor;
  }
  sync_block();
  float factor[8], offset[8];
  load8(factors + position.channel, factor);
  load8(offsets + position.channel, offset);
  _Pragma("unroll 4") for (int k = 0; k < LOADS; k++) {
    unpack8(data[k * THREADS + threadIdx.x], x);
    affine_silu8(x, factor, offset);
    store4(a.out + position.at(k), pack8(x));
  }
}
