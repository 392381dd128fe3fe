// Group norm and SiLU for maps (rows, pixels, channels) of bfloat16, there and back.
//
// A cluster of SPLIT blocks takes one map, of which each has its share in shared memory
// between the sums and what they are for: so, device memory is read once and written
// once. A thread has eight neighbouring channels of LOADS pixels. Sums meet within a
// warp, within a block, and then every block tells all of its cluster.
//
// PIXELS, CHANNELS, GROUPS, SPLIT, THREADS, and how many BLOCKS a processor is to have
// room for, come from the host.

constexpr int COLUMNS = CHANNELS / 8, WARPS = THREADS / 32, PER = CHANNELS / GROUPS;
constexpr int SHARE = PIXELS / SPLIT * CHANNELS;  // numbers of a block
constexpr int LOADS = SHARE / 8 / THREADS, PIECES = LOADS < 4 ? LOADS : 4;
static_assert(LOADS * 8 * THREADS == SHARE && LOADS % PIECES == 0, "");
static_assert(SHARE * SPLIT == PIXELS * CHANNELS && 32 % COLUMNS == 0, "");

template <int KINDS>
struct Room {
  float warps[WARPS][KINDS * CHANNELS];
  float all[SPLIT][KINDS * CHANNELS];
  float one[CHANNELS], two[CHANNELS], three[CHANNELS];
  Gate gates[PIECES];
};

struct Place {
  u32 rank, row, column;
  size_t map, share;  // where both begin
  DEVICE Place() {
    rank = ::rank();
    row = blockIdx.x / SPLIT;
    column = threadIdx.x % COLUMNS * 8;
    map = (size_t)row * PIXELS * CHANNELS;
    share = map + rank * SHARE;
  }
  DEVICE size_t at(int load) const { return share + (load * THREADS + threadIdx.x) * 8; }
};

// Has maps brought to shared memory, in pieces, one map behind the other.
template <int MAPS>
DEVICE void send_for(const u16* const (&maps)[MAPS], uint4* data, Gate* gates,
                     const Place& place) {
  constexpr u32 BYTES = SHARE * 2 / PIECES;
  if (threadIdx.x == 0) {
    open_gates(gates, PIECES);
    for (int i = 0; i < PIECES; i++) {
      announce(gates + i, MAPS * BYTES);
      UNROLL for (int m = 0; m < MAPS; m++)
        fetch(data + (m * SHARE / 8 + i * (SHARE / PIECES / 8)),
              maps[m] + place.share + i * (SHARE / PIECES), BYTES, gates + i);
    }
  }
  meet_block();
  if (SPLIT > 1) arrive();  // no block writes to one that has not begun
}

// One number for each kind and channel and block, in `room.all` of every block, or of
// the first one only. All blocks have arrived before, and nobody needs the last sums.
template <int KINDS, int MOST>
DEVICE void sum_up(float (&mine)[KINDS][8], Room<MOST>& room, const Place& place,
                   bool everywhere) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  UNROLL for (int kind = 0; kind < KINDS; kind++) {
    UNROLL for (int j = 0; j < 8; j++) {
      float x = mine[kind][j];
      UNROLL for (int m = 16; m >= COLUMNS; m >>= 1) x = plus_lane(x, m);
      if (lane < COLUMNS) room.warps[warp][kind * CHANNELS + lane * 8 + j] = x;
    }
  }
  meet_block();
  if (SPLIT > 1) wait();
  for (u32 t = threadIdx.x; t < KINDS * CHANNELS; t += THREADS) {
    float x = 0;
    UNROLL for (int w = 0; w < WARPS; w++) x += room.warps[w][t];
    float* here = room.all[0] + place.rank * KINDS * CHANNELS + t;
    if (SPLIT == 1)
      *here = x;
    else
      for (int r = 0; r < (everywhere ? SPLIT : 1); r++) tell(here, r, x);
  }
  if (SPLIT > 1) {
    arrive();
    wait();
  } else {
    meet_block();
  }
}

template <int KINDS>
DEVICE float total(const float* there, int kind, u32 channel) {
  float x = 0;
  UNROLL for (int r = 0; r < SPLIT; r++)
    x += there[(r * KINDS + kind) * CHANNELS + channel];
  return x;
}

// The sum over the channels of a group.
DEVICE float grouped(const float* x, u32 channel) {
  const u32 first = channel / PER * PER;
  float sum = 0;
  UNROLL for (int i = 0; i < PER; i++) sum += x[first + i];
  return sum;
}

#define EACH_CHANNEL for (u32 c = threadIdx.x; c < CHANNELS; c += THREADS)
