// Norm, SiLU and 3x3 convolution of maps (rows, HEIGHT, WIDTH, CHANNELS) of bfloat16.
//
// A block of threads takes TALL lines of one map, and one more above and below. What a
// norm makes of them goes to shared memory, where pixels outside of the map are zero; a
// warp then convolves 4 lines of 16 pixels to 32 channels, with each line of the input
// at hand for all lines of the output that it reaches. Whoever makes a map measures
// each part of it; whoever needs the norm of a whole map merges its parts.
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

struct Arguments {
  const u16 *x, *bias;  // a map, and what is to be added ahead of its norm
  const float *scale, *shift;
  const u16 *weight, *beside, *last;  // the last two are added at the end
  const float* sums;                  // of the map
  float *stats, *found;               // its norm, and the sums of what comes out
  u16* out;
  float eps;
};

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

// Measures what this block of threads has, in lanes as `Place` says.
DEVICE void measure(const uint4 (&mine)[8], Room& room, const Place& place, float* to) {
  float sum[8] = {}, x[8];
  UNROLL for (int p = 0; p < 8; p++) {
    spread(mine[p], x);
    UNROLL for (int j = 0; j < 8; j++) sum[j] += x[j];
  }
  UNROLL for (int j = 0; j < 8; j++) {
    UNROLL for (int m = 4; m < 32; m <<= 1) sum[j] = plus_lane(sum[j], m);
    sum[j] /= OWN;
  }
  float square[8] = {};
  UNROLL for (int p = 0; p < 8; p++) {
    spread(mine[p], x);
    UNROLL for (int j = 0; j < 8; j++) square[j] += (x[j] - sum[j]) * (x[j] - sum[j]);
  }
  UNROLL for (int j = 0; j < 8; j++) {
    UNROLL for (int m = 4; m < 32; m <<= 1) square[j] = plus_lane(square[j], m);
    if (place.lane < 4) {
      room.warps[place.warp][0][place.lane * 8 + j] = sum[j];
      room.warps[place.warp][1][place.lane * 8 + j] = square[j];
    }
  }
  meet_block();
  const u32 c = threadIdx.x;
  if (c < CHANNELS) {
    float mean, all;
    const float* means = room.warps[c / 32][0] + c % 32;
    merge<WARPS / HALVES>(means, means + 32, HALVES * 64, OWN, mean, all);
    to += ((size_t)place.row * PARTS + place.part) * 2 * CHANNELS + c;
    to[0] = mean;
    to[CHANNELS] = all;
  }
}

KERNEL measure_parts(Arguments a) {
  ROOM(Room);
  const Place place;
  let_next_come();
  await_last();
  uint4 mine[8];
  UNROLL for (int p = 0; p < 8; p++) mine[p] = load4(a.x + place.at(p));
  measure(mine, room, place, a.found);
}

// The norm of a map, as what each channel is to be multiplied with, and to be added.
DEVICE void find_norm(const Arguments& a, Room& room, const Place& place) {
  const u32 c = threadIdx.x;
  if (c >= CHANNELS) return;
  const float lead = a.bias ? number(a.bias + c) : 0.f;
  const float scale = a.scale[c], shift = a.shift[c];
  const float* means = a.sums + (size_t)place.row * PARTS * 2 * CHANNELS + c;
  float mean, own;
  merge<PARTS>(means, means + CHANNELS, 2 * CHANNELS, PIXELS / PARTS, mean, own);
  mean += lead;
  float middle = mean;
  UNROLL for (int m = 1; m < PER; m <<= 1) middle = plus_lane(middle, m);
  middle /= PER;
  own += PIXELS * (mean - middle) * (mean - middle);
  UNROLL for (int m = 1; m < PER; m <<= 1) own = plus_lane(own, m);
  const float root = one_by_root(own / (PIXELS * PER) + a.eps);
  if (place.part == 0) {
    float* stats = a.stats + (size_t)place.row * 2 * CHANNELS + c;
    stats[0] = middle;
    stats[CHANNELS] = root;
  }
  const float gain = root * scale;
  room.gain[c] = gain;
  room.lift[c] = shift - (middle - lead) * gain;
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

// The activation of the lines of this block, and of those around.
DEVICE void fill(uint4* tile, const Arguments& a, Room& room, const Place& place) {
  const u32 chunk = threadIdx.x % CHUNKS;
  const int top = place.part * TALL - 1;
  uint4 v[LOADS];
  UNROLL for (int k = 0; k < LOADS; k++) {
    const u32 pixel = (k * THREADS + threadIdx.x) / CHUNKS;
    const int y = top + (int)(pixel / WIDTH);
    v[k] = uint4{0, 0, 0, 0};
    if (y >= 0 && y < HEIGHT)
      v[k] = load4(a.x + place.map + (y * WIDTH + pixel % WIDTH) * CHANNELS + chunk * 8);
  }
  find_norm(a, room, place);
  for (u32 i = threadIdx.x; i < (TALL + 2) * 2 * CHUNKS; i += THREADS) {
    const u32 side = i / CHUNKS % 2 * (WIDTH + 1), y = i / CHUNKS / 2;
    tile[tile_at(y * PITCH + side, i % CHUNKS)] = uint4{0, 0, 0, 0};
  }
  meet_block();
  float gain[8], lift[8];
  recall(room.gain + chunk * 8, gain);
  recall(room.lift + chunk * 8, lift);
  UNROLL for (int k = 0; k < LOADS; k++) {
    const u32 pixel = (k * THREADS + threadIdx.x) / CHUNKS;
    const int y = top + (int)(pixel / WIDTH);
    if (y >= 0 && y < HEIGHT) activate(v[k], gain, lift);
    tile[tile_at((y - top) * PITCH + pixel % WIDTH + 1, chunk)] = v[k];
  }
}

// Four lines of a tile to one of outputs each. Of every 8 outputs that are computed
// together, a lane has two; the order of weights makes all of its outputs neighbours.
DEVICE void multiply(const uint4* tile, const uint4* weights, const Place& place,
                     float (&sums)[4][4][4]) {
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

KERNEL convolve(Arguments a) {
  ROOM(Room);
  const Place place;
  let_next_come();
  uint4 *const weights = data, *const tile = data + WEIGHTS;
  for (u32 i = threadIdx.x; i < WEIGHTS; i += THREADS) {
    const u32 row = i / CHUNKS;
    send(weights + weight_at(row / 9, row % 9, i % CHUNKS), a.weight + i * 8);
  }
  await_last();  // up to here, nothing was read that other kernels write
  fill(tile, a, room, place);
  await_sent();
  meet_block();
  float sums[4][4][4] = {};  // lines, eights of outputs, and what a lane has of them
  multiply(tile, weights, place, sums);
  uint4 out[8];
  if (a.beside) {
    float last[8], x[8];
    spread(load4(a.last + place.channel), last);
    UNROLL for (int p = 0; p < 8; p++) out[p] = load4(a.beside + place.at(p));
    UNROLL for (int p = 0; p < 8; p++) {
      spread(out[p], x);
      UNROLL for (int j = 0; j < 8; j++)
        sums[p / 2][j / 2][p % 2 * 2 + j % 2] += x[j] + last[j];
    }
  }
  UNROLL for (int p = 0; p < 8; p++) {
    float y[8];
    UNROLL for (int j = 0; j < 8; j++) y[j] = sums[p / 2][j / 2][p % 2 * 2 + j % 2];
    out[p] = gather(y);
    store4(a.out + place.at(p), out[p]);
  }
  if (a.found) measure(out, room, place, a.found);
}
