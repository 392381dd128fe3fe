// Group norm, SiLU and 3x3 convolution of bfloat16 feature maps (batch, HEIGHT, WIDTH,
// CHANNELS).
//
// A thread block handles ROWS pixel rows of one feature map (a part), and loads one more
// row above and below. It writes their activations to shared memory (the tile), with
// zeros outside of the map. A warp then computes 4 rows of 16 pixels and 32 channels,
// using each input row for all output rows that depend on it. Blocks compute the
// statistics of their part of the output; the next norm merges the parts of a map.
//
// In shared memory, the chunks of 8 channels of a pixel (and of a row of weights) are
// permuted differently from pixel to pixel, so that 8 adjacent pixels are in different
// banks.
//
// The host defines HEIGHT, WIDTH, CHANNELS, GROUPS, ROWS, THREADS, and BLOCKS_PER_SM.

constexpr int PIXELS = HEIGHT * WIDTH, PARTS = HEIGHT / ROWS;
constexpr int PER_GROUP = CHANNELS / GROUPS;  // channels of a group of the norm
// CHUNKS is the number of chunks of 8 channels, the unit of a load. HALVES (1 or 2) is
// the number of groups of 32 channels, which different warps compute.
constexpr int CHUNKS = CHANNELS / 8, HALVES = CHANNELS / 32, WARPS = THREADS / 32;
constexpr int ACROSS = WIDTH / 16;  // warps along a pixel row
constexpr int PITCH = WIDTH + 8;    // row stride of the tile in pixels; pixel 0 is zero
constexpr int LOADS = (ROWS + 2) * WIDTH * CHUNKS / THREADS;  // per thread
constexpr int WEIGHTS = 9 * CHANNELS * CHUNKS;                // chunks of all weights
constexpr int WARP_PIXELS = 64;                               // 4 rows of 16 pixels
static_assert(PARTS * ROWS == HEIGHT && ACROSS * 16 == WIDTH && ROWS % 4 == 0, "");
static_assert(WARPS == ROWS / 4 * ACROSS * HALVES && THREADS >= CHANNELS, "");
static_assert(LOADS * THREADS == (ROWS + 2) * WIDTH * CHUNKS && PITCH % 8 == 0, "");
static_assert(HALVES == 1 || HALVES == 2, "");

// Static shared memory: factor and offset of the norm per channel; mean and sum of squared
// deviations per warp and channel.
struct Scratch {
  float factor[CHANNELS], offset[CHANNELS];
  float warps[WARPS][2][32];
};

// Output of a thread: 8 channels of 8 pixels; `at` returns the offset of one of the
// pixels. `half` is the group of 32 channels that the warp computes, `row` and `column`
// are the first pixel of the warp in the part, and `map` is the offset of the map.
struct Position {
  u32 image, part, lane, warp, half, row, column, channel;
  size_t map;
  DEVICE Position() {
    image = blockIdx.x / PARTS;
    part = blockIdx.x % PARTS;
    lane = threadIdx.x % 32;
    warp = threadIdx.x / 32;
    half = warp % HALVES;
    row = warp / HALVES / ACROSS * 4;
    column = warp / HALVES % ACROSS * 16;
    channel = half * 32 + lane % 4 * 8;
    map = (size_t)image * PIXELS * CHANNELS;
  }
  DEVICE size_t at(int pixel) const {
    const u32 y = part * ROWS + row + pixel / 2;
    const u32 x = column + pixel % 2 * 8 + lane / 4;
    return map + (y * WIDTH + x) * CHANNELS + channel;
  }
};

// Merges means and sums of squared deviations of COUNT parts with `count` values each.
template <int COUNT>
DEVICE void merge(const float* means, const float* squares, int stride, float count,
                  float& mean, float& square) {
  float part_mean[COUNT], part_square[COUNT];
  UNROLL for (int i = 0; i < COUNT; i++) part_mean[i] = means[i * stride];
  UNROLL for (int i = 0; i < COUNT; i++) part_square[i] = squares[i * stride];
  mean = square = 0;
  UNROLL for (int i = 0; i < COUNT; i++) mean += part_mean[i];
  mean /= COUNT;
  UNROLL for (int i = 0; i < COUNT; i++) {
    const float difference = part_mean[i] - mean;
    square += part_square[i] + count * difference * difference;
  }
}

// Returns the sum over the lanes that have the same channels.
DEVICE float sum_lanes(float x) {
  UNROLL for (int m = 4; m < 32; m <<= 1) x = add_lane_xor(x, m);
  return x;
}

// Computes mean and sum of squared deviations of each warp's pixels, per channel.
DEVICE void warp_statistics(const uint4 (&values)[8], Scratch& scratch,
                    const Position& position) {
  UNROLL for (int j = 0; j < 8; j++) {
    float x[8], sum = 0, square = 0;
    UNROLL for (int p = 0; p < 8; p++) {
      const u32 words[4] = {values[p].x, values[p].y, values[p].z, values[p].w};
      x[p] = j % 2 ? high(words[j / 2]) : low(words[j / 2]);
      sum += x[p];
    }
    const float mean = sum_lanes(sum) / WARP_PIXELS;
    UNROLL for (int p = 0; p < 8; p++) square += (x[p] - mean) * (x[p] - mean);
    square = sum_lanes(square);
    if (position.lane < 4) {
      scratch.warps[position.warp][0][position.lane * 8 + j] = mean;
      scratch.warps[position.warp][1][position.lane * 8 + j] = square;
    }
  }
  sync_block();
}
// Merges the results of all warps of the block, for one channel.
DEVICE void merge_warps(const Scratch& scratch, u32 c, float& mean, float& square) {
  const float* means = scratch.warps[c / 32][0] + c % 32;
  merge<WARPS / HALVES>(means, means + 32, HALVES * 64, WARP_PIXELS, mean, square);
}

// Parameters of the norm for this thread's channel; the bias is added before the norm.
struct Norm {
  float bias, scale, shift;
  DEVICE Norm(const bf16* biases, const float* scales, const float* shifts) {
    const u32 c = threadIdx.x % CHANNELS;
    bias = biases ? to_float(biases[c]) : 0.f;
    scale = scales[c];
    shift = shifts[c];
  }
};

// Computes factor and offset per channel, so that the norm is `x * factor + offset`.
// `parts` has mean and sum of squared deviations of each part; mean and 1 / standard
// deviation are written to `stats`.
DEVICE void compute_norm(const Norm& norm, const float* parts, float* stats, float eps,
                         Scratch& scratch, const Position& position) {
  const u32 c = threadIdx.x;
  if (c >= CHANNELS) return;
  float mean, square;
  merge<PARTS>(parts + c, parts + CHANNELS + c, 2 * CHANNELS, PIXELS / PARTS, mean,
               square);
  mean += norm.bias;
  float group_mean = mean;
  UNROLL for (int m = 1; m < PER_GROUP; m <<= 1) group_mean = add_lane_xor(group_mean, m);
  group_mean /= PER_GROUP;
  square += PIXELS * (mean - group_mean) * (mean - group_mean);
  UNROLL for (int m = 1; m < PER_GROUP; m <<= 1) square = add_lane_xor(square, m);
  const float rstd = inverse_sqrt(square / (PIXELS * PER_GROUP) + eps);
  if (position.part == 0) {
    stats += (size_t)position.image * 2 * CHANNELS + c;
    stats[0] = group_mean;
    stats[CHANNELS] = rstd;
  }
  const float factor = rstd * norm.scale;
  scratch.factor[c] = factor;
  scratch.offset[c] = norm.shift - (group_mean - norm.bias) * factor;
}

// Return the index of a chunk of 8 channels in the tile, and in the weights of an output
// channel (`unit`). The xor permutes the chunks, to avoid bank conflicts.
DEVICE u32 tile_at(u32 pixel, u32 chunk) {
  return pixel * CHUNKS + (chunk ^ (HALVES == 1 ? pixel / 2 % 4 : pixel % 8));
}
DEVICE u32 weight_at(u32 unit, u32 tap, u32 chunk) {
  const u32 swizzle = unit / 8 % 4;
  return (unit * 9 + tap) * CHUNKS + (chunk ^ (HALVES == 1 ? swizzle : swizzle * 2 + unit % 2));
}

// Applies norm and SiLU to 8 channels.
DEVICE void activate(uint4& v, const float (&factor)[8], const float (&offset)[8]) {
  float x[8];
  unpack8(v, x);
  affine_silu8(x, factor, offset);
  v = pack8(x);
}

// `load_rows` loads the block's pixel rows and one row above and below. `inside` is true
// if the row of a load is in the map.
DEVICE bool inside(const Position& position, int load) {
  const int y =
      position.part * ROWS - 1 + (load * THREADS + threadIdx.x) / CHUNKS / WIDTH;
  return y >= 0 && y < HEIGHT;
}
DEVICE void load_rows(uint4 (&v)[LOADS], const bf16* x, const Position& position) {
  const bf16* const first =
      x + position.map + ((int)position.part * ROWS - 1) * WIDTH * CHANNELS;
  UNROLL for (int k = 0; k < LOADS; k++) {
    v[k] = uint4{0, 0, 0, 0};
    if (inside(position, k)) v[k] = load4(first + (k * THREADS + threadIdx.x) * 8);
  }
}

// `store_rows` writes the activations of these rows to the tile. `clear_borders` writes
// zeros to the left and right borders of the tile.
DEVICE void store_rows(uint4 (&v)[LOADS], uint4* tile, const Scratch& scratch,
                       const Position& position) {
  const u32 chunk = threadIdx.x % CHUNKS;
  float factor[8], offset[8];
  load8(scratch.factor + chunk * 8, factor);
  load8(scratch.offset + chunk * 8, offset);
  UNROLL for (int k = 0; k < LOADS; k++) {
    const u32 pixel = (k * THREADS + threadIdx.x) / CHUNKS;
    if (inside(position, k)) activate(v[k], factor, offset);
    tile[tile_at(pixel / WIDTH * PITCH + pixel % WIDTH + 1, chunk)] = v[k];
  }
}
DEVICE void clear_borders(uint4* tile) {
  for (u32 i = threadIdx.x; i < (ROWS + 2) * 2 * CHUNKS; i += THREADS) {
    const u32 side = i / CHUNKS % 2 * (WIDTH + 1), y = i / CHUNKS / 2;
    tile[tile_at(y * PITCH + side, i % CHUNKS)] = uint4{0, 0, 0, 0};
  }
}
// Starts to copy all weights to shared memory.
DEVICE void copy_weights(uint4* weights, const bf16* from) {
  for (u32 i = threadIdx.x; i < WEIGHTS; i += THREADS) {
    const u32 row = i / CHUNKS;
    copy_async16(weights + weight_at(row / 9, row % 9, i % CHUNKS), from + i * 8);
  }
}

// Accumulators of a lane: pixel rows, groups of 8 channels, values of a lane.
typedef float Sums[4][4][4];

// Computes four pixel rows of the convolution. In a matrix product, a lane gets two of
// every 8 columns. `unit` is the output channel whose weights a lane loads; it is chosen
// such that the 8 channels that a lane gets are adjacent.
DEVICE void multiply(const uint4* tile, const uint4* weights, const Position& position,
                     Sums& sums) {
  const u32 lane = position.lane;
  const u32 pixel = position.row * PITCH + position.column + lane % 16;
  const u32 unit = position.half * 32 + lane % 8 / 2 * 8 + lane / 16 * 2 + lane % 2;
  UNROLL for (u32 k = 0; k < CHUNKS; k += 2) {
    const uint4* const from = weights + weight_at(unit, 0, k + lane / 8 % 2);
    UNROLL for (u32 dx = 0; dx < 3; dx++) {
      const uint4* const line = tile + tile_at(pixel + dx, k + lane / 16);
      // `line` and `from` plus constant offsets are enough, because the permutation of
      // chunks is the same in all rows, and in units 4 apart
      u32 b[3][2][4], input[4];
      UNROLL for (u32 dy = 0; dy < 3; dy++) {
        UNROLL for (u32 n = 0; n < 2; n++)
          load_matrices(b[dy][n], from + (n * 4 * 9 + dy * 3 + dx) * CHUNKS);
      }
      UNROLL for (int y = 0; y < 6; y++) {
        load_matrices(input, line + y * PITCH * CHUNKS);
        UNROLL for (int dy = 0; dy < 3; dy++) {
          if (y - dy < 0 || y - dy > 3) continue;
          UNROLL for (int n = 0; n < 4; n++)
            multiply_add(sums[y - dy][n], input, b[dy][n / 2][n % 2 * 2],
                         b[dy][n / 2][n % 2 * 2 + 1]);
        }
      }
    }
  }
}

// Adds the shortcut and the output bias to the sums.
DEVICE void add_shortcut(Sums& sums, const bf16* shortcut, const bf16* output_bias,
                         const Position& position) {
  uint4 v[8];
  float bias[8], x[8];
  UNROLL for (int p = 0; p < 8; p++) v[p] = load4(shortcut + position.at(p));
  unpack8(load4(output_bias + position.channel), bias);
  UNROLL for (int p = 0; p < 8; p++) {
    unpack8(v[p], x);
    UNROLL for (int j = 0; j < 8; j++)
      sums[p / 2][j / 2][p % 2 * 2 + j % 2] += x[j] + bias[j];
  }
}
// Rounds the sums to bfloat16, writes them to memory, and returns them in `out`.
DEVICE void store_output(const Sums& sums, bf16* to, uint4 (&out)[8],
                         const Position& position) {
  UNROLL for (int p = 0; p < 8; p++) {
    float y[8];
    UNROLL for (int j = 0; j < 8; j++) y[j] = sums[p / 2][j / 2][p % 2 * 2 + j % 2];
    out[p] = pack8(y);
    store4(to + position.at(p), out[p]);
  }
}
