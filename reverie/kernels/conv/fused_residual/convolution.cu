// Norm, SiLU and 3x3 convolution of maps (rows, HEIGHT, WIDTH, CHANNELS) of bfloat16.
//
// A block of threads takes TALL lines of one map, and one more above and below. What a
// norm makes of them goes to shared memory, where pixels outside of the map are zero; a
// warp then convolves 4 lines of 16 pixels to 32 channels, with each line of the input
// at hand for all lines of the output that it reaches. Blocks measure the part that
// they have; a norm merges the parts of a map.
//
// In shared memory, the chunks of 8 channels of a pixel (and of a row of weights) change
// places from pixel to pixel, so that 8 pixels in a row are in different banks.
//
// HEIGHT, WIDTH, CHANNELS, GROUPS, TALL, THREADS, and how many BLOCKS a processor is to
// have room for, come from the host.

constexpr int PIXELS = HEIGHT * WIDTH, PARTS = HEIGHT / TALL, PER = CHANNELS / GROUPS;
constexpr int CHUNKS = CHANNELS / 8, HALVES = CHANNELS / 32, WARPS = THREADS / 32;
constexpr int ACROSS = WIDTH / 16;  // warps side by side
constexpr int PITCH = WIDTH + 8;    // pixels of a line; the map begins at the second
constexpr int LOADS = (TALL + 2) * WIDTH * CHUNKS / THREADS;
constexpr int WEIGHTS = 9 * CHANNELS * CHUNKS;
constexpr int OWN = 64;  // pixels of a warp
static_assert(PARTS * TALL == HEIGHT && ACROSS * 16 == WIDTH && TALL % 4 == 0, "");
static_assert(WARPS == TALL / 4 * ACROSS * HALVES && THREADS >= CHANNELS, "");
static_assert(LOADS * THREADS == (TALL + 2) * WIDTH * CHUNKS && PITCH % 8 == 0, "");
static_assert(HALVES == 1 || HALVES == 2, "");

struct Room {
  float gain[CHANNELS], lift[CHANNELS];
  float warps[WARPS][2][32];
};

// Which pixels and channels come out of a warp; a lane has 8 pixels and 8 channels.
struct Place {
  u32 row, part, lane, warp, half, line, column, channel;
  size_t map;
  DEVICE Place() {
    row = blockIdx.x / PARTS;
    part = blockIdx.x % PARTS;
    lane = threadIdx.x % 32;
    warp = threadIdx.x / 32;
    half = warp % HALVES;
    line = warp / HALVES / ACROSS * 4;
    column = warp / HALVES % ACROSS * 16;
    channel = half * 32 + lane % 4 * 8;
    map = (size_t)row * PIXELS * CHANNELS;
  }
  DEVICE size_t at(int pixel) const {
    const u32 y = part * TALL + line + pixel / 2;
    const u32 x = column + pixel % 2 * 8 + lane / 4;
    return map + (y * WIDTH + x) * CHANNELS + channel;
  }
};

// From mean and squared deviations of each of COUNT parts, to those of the whole.
template <int COUNT>
DEVICE void merge(const float* means, const float* squares, int stride, float each,
                  float& mean, float& square) {
  float part[COUNT], more[COUNT];
  UNROLL for (int i = 0; i < COUNT; i++) part[i] = means[i * stride];
  UNROLL for (int i = 0; i < COUNT; i++) more[i] = squares[i * stride];
  mean = square = 0;
  UNROLL for (int i = 0; i < COUNT; i++) mean += part[i];
  mean /= COUNT;
  UNROLL for (int i = 0; i < COUNT; i++) {
    const float away = part[i] - mean;
    square += more[i] + each * away * away;
  }
}

// Over the lanes that have the same channels.
DEVICE float over_warp(float x) {
  UNROLL for (int m = 4; m < 32; m <<= 1) x = plus_lane(x, m);
  return x;
}

// Measures what a block has, in lanes as `Place` says: each warp its pixels.
DEVICE void measure(const uint4 (&mine)[8], Room& room, const Place& place) {
  UNROLL for (int j = 0; j < 8; j++) {
    float x[8], sum = 0, square = 0;
    UNROLL for (int p = 0; p < 8; p++) {
      const u32 words[4] = {mine[p].x, mine[p].y, mine[p].z, mine[p].w};
      x[p] = j % 2 ? high(words[j / 2]) : low(words[j / 2]);
      sum += x[p];
    }
    const float mean = over_warp(sum) / OWN;
    UNROLL for (int p = 0; p < 8; p++) square += (x[p] - mean) * (x[p] - mean);
    square = over_warp(square);
    if (place.lane < 4) {
      room.warps[place.warp][0][place.lane * 8 + j] = mean;
      room.warps[place.warp][1][place.lane * 8 + j] = square;
    }
  }
  meet_block();
}
// And for one channel, all of them.
DEVICE void merge_warps(const Room& room, u32 c, float& mean, float& square) {
  const float* means = room.warps[c / 32][0] + c % 32;
  merge<WARPS / HALVES>(means, means + 32, HALVES * 64, OWN, mean, square);
}

// What one channel needs to know of a norm; a bias is added ahead of it.
struct Norm {
  float lead, scale, shift;
  DEVICE Norm(const u16* bias, const float* scales, const float* shifts) {
    const u32 c = threadIdx.x % CHANNELS;
    lead = bias ? number(bias + c) : 0.f;
    scale = scales[c];
    shift = shifts[c];
  }
};

// The norm of a map, as what each channel is to be multiplied with, and to be added.
// `parts` has mean and squared deviations of each, `stats` gets mean and 1 / deviation.
DEVICE void find_norm(const Norm& norm, const float* parts, float* stats, float eps,
                      Room& room, const Place& place) {
  const u32 c = threadIdx.x;
  if (c >= CHANNELS) return;
  float mean, own;
  merge<PARTS>(parts + c, parts + CHANNELS + c, 2 * CHANNELS, PIXELS / PARTS, mean, own);
  mean += norm.lead;
  float middle = mean;
  UNROLL for (int m = 1; m < PER; m <<= 1) middle = plus_lane(middle, m);
  middle /= PER;
  own += PIXELS * (mean - middle) * (mean - middle);
  UNROLL for (int m = 1; m < PER; m <<= 1) own = plus_lane(own, m);
  const float root = one_by_root(own / (PIXELS * PER) + eps);
  if (place.part == 0) {
    stats += (size_t)place.row * 2 * CHANNELS + c;
    stats[0] = middle;
    stats[CHANNELS] = root;
  }
  const float gain = root * norm.scale;
  room.gain[c] = gain;
  room.lift[c] = norm.shift - (middle - norm.lead) * gain;
}

// Where a chunk of channels of a pixel is in the tile, and one of a row of weights.
DEVICE u32 tile_at(u32 pixel, u32 chunk) {
  return pixel * CHUNKS + (chunk ^ (HALVES == 1 ? pixel / 2 % 4 : pixel % 8));
}
DEVICE u32 weight_at(u32 unit, u32 tap, u32 chunk) {
  const u32 turn = unit / 8 % 4;
  return (unit * 9 + tap) * CHUNKS + (chunk ^ (HALVES == 1 ? turn : turn * 2 + unit % 2));
}

DEVICE void activate(uint4& v, const float (&gain)[8], const float (&lift)[8]) {
  float x[8];
  spread(v, x);
  UNROLL for (int j = 0; j < 8; j += 2) {
    const float z = x[j] * gain[j] + lift[j];
    const float y = x[j + 1] * gain[j + 1] + lift[j + 1];
    float open, wide;
    sigmoids(z, y, open, wide);
    x[j] = z * open;
    x[j + 1] = y * wide;
  }
  v = gather(x);
}

// The lines of a block and those around it, where they are inside of the map.
DEVICE bool inside(const Place& place, int load) {
  const int y = place.part * TALL - 1 + (load * THREADS + threadIdx.x) / CHUNKS / WIDTH;
  return y >= 0 && y < HEIGHT;
}
DEVICE void load_lines(uint4 (&v)[LOADS], const u16* x, const Place& place) {
  const u16* const first = x + place.map + ((int)place.part * TALL - 1) * WIDTH * CHANNELS;
  UNROLL for (int k = 0; k < LOADS; k++) {
    v[k] = uint4{0, 0, 0, 0};
    if (inside(place, k)) v[k] = load4(first + (k * THREADS + threadIdx.x) * 8);
  }
}

// Their activation, with nothing beside it.
DEVICE void store_lines(uint4 (&v)[LOADS], uint4* tile, const Room& room,
                        const Place& place) {
  const u32 chunk = threadIdx.x % CHUNKS;
  float gain[8], lift[8];
  recall(room.gain + chunk * 8, gain);
  recall(room.lift + chunk * 8, lift);
  UNROLL for (int k = 0; k < LOADS; k++) {
    const u32 pixel = (k * THREADS + threadIdx.x) / CHUNKS;
    if (inside(place, k)) activate(v[k], gain, lift);
    tile[tile_at(pixel / WIDTH * PITCH + pixel % WIDTH + 1, chunk)] = v[k];
  }
}
DEVICE void clear_sides(uint4* tile) {
  for (u32 i = threadIdx.x; i < (TALL + 2) * 2 * CHUNKS; i += THREADS) {
    const u32 side = i / CHUNKS % 2 * (WIDTH + 1), y = i / CHUNKS / 2;
    tile[tile_at(y * PITCH + side, i % CHUNKS)] = uint4{0, 0, 0, 0};
  }
}
DEVICE void send_weights(uint4* weights, const u16* from) {
  for (u32 i = threadIdx.x; i < WEIGHTS; i += THREADS) {
    const u32 row = i / CHUNKS;
    send(weights + weight_at(row / 9, row % 9, i % CHUNKS), from + i * 8);
  }
}

// Of a lane: lines, eights of outputs, and what it has of them.
typedef float Sums[4][4][4];

// Four lines of a tile to one of outputs each. Of every 8 outputs that are computed
// together, a lane has two; the order of weights makes all of its outputs neighbours.
DEVICE void multiply(const uint4* tile, const uint4* weights, const Place& place,
                     Sums& sums) {
  const u32 lane = place.lane;
  const u32 pixel = place.line * PITCH + place.column + lane % 16;
  const u32 unit = place.half * 32 + lane % 8 / 2 * 8 + lane / 16 * 2 + lane % 2;
  UNROLL for (u32 k = 0; k < CHUNKS; k += 2) {
    const uint4* const from = weights + weight_at(unit, 0, k + lane / 8 % 2);
    UNROLL for (u32 dx = 0; dx < 3; dx++) {
      const uint4* const line = tile + tile_at(pixel + dx, k + lane / 16);
      u32 b[3][2][4], input[4];  // all lines, and units 4 apart, have chunks alike
      UNROLL for (u32 dy = 0; dy < 3; dy++) {
        UNROLL for (u32 n = 0; n < 2; n++)
          collect(b[dy][n], from + (n * 4 * 9 + dy * 3 + dx) * CHUNKS);
      }
      UNROLL for (int y = 0; y < 6; y++) {
        collect(input, line + y * PITCH * CHUNKS);
        UNROLL for (int dy = 0; dy < 3; dy++) {
          if (y - dy < 0 || y - dy > 3) continue;
          UNROLL for (int n = 0; n < 4; n++)
            add_product(sums[y - dy][n], input, b[dy][n / 2][n % 2 * 2],
                        b[dy][n / 2][n % 2 * 2 + 1]);
        }
      }
    }
  }
}

// What comes out of a lane, and what is added to it before.
DEVICE void add_beside(Sums& sums, const u16* beside, const u16* last, const Place& place) {
  uint4 v[8];
  float lead[8], x[8];
  UNROLL for (int p = 0; p < 8; p++) v[p] = load4(beside + place.at(p));
  spread(load4(last + place.channel), lead);
  UNROLL for (int p = 0; p < 8; p++) {
    spread(v[p], x);
    UNROLL for (int j = 0; j < 8; j++)
      sums[p / 2][j / 2][p % 2 * 2 + j % 2] += x[j] + lead[j];
  }
}
DEVICE void store_out(const Sums& sums, u16* to, uint4 (&out)[8], const Place& place) {
  UNROLL for (int p = 0; p < 8; p++) {
    float y[8];
    UNROLL for (int j = 0; j < 8; j++) y[j] = sums[p / 2][j / 2][p % 2 * 2 + j % 2];
    out[p] = gather(y);
    store4(to + place.at(p), out[p]);
  }
}
