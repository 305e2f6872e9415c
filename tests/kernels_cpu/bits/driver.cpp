// Prints what the CPU kernels give, so that two machines can be compared bit by bit.
//
//   driver                         which level is the best here
//   driver LEVEL [rounds [seed]]   one line for each run: operator, number, digest of its results
//
// Shapes, strides, weights and values are those of the sanitizers' fuzz (../sanitized/fuzz.h), which
// depend on the seed alone, and every kind of weight at every number of rows. Linked with the
// library as it is shipped, whose level LEVEL it asks for by name ("": the best). All NaNs count as one.
#include "fuzz.h"

namespace {

int g_number = 0;

void print(const char* what, const fuzz::Bytes& bytes) {
  uint64_t digest = 14695981039346656037ull;  // FNV-1a
  for (uint8_t byte : bytes) digest = (digest ^ byte) * 1099511628211ull;
  printf("%s %d %016llx\n", what, g_number++, static_cast<unsigned long long>(digest));
}

void products(void* const* teams, int count) {
  constexpr int kOut = 49;
  for (const Kind& kind : kKinds) {
    const bool dense = kind.span == 1;
    const int in = dense ? 37 : 512;
    Weight weight(teams[0], kind, kOut, in);
    for (int rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 17, 33}) {
      Grid x(rows, in), y(rows, kOut);
      Codes codes(rows, in / 32 * 32);
      x.fill(false);
      for (int i = 0; i < in; ++i) {  // a huge row, a tiny one, one with what is no number
        x.at(0)[i] *= 1e30f;
        if (rows > 4) x.at(3)[i] *= 1e-36f;
        if (rows > 5) x.at(5)[i] = any_float();
      }
      HrPart part = weight.part(y.block.data, y.stride, nullptr, false);
      HrQuantise quantise{x.block.data, x.stride, codes.q, nullptr, in, HR_ROWS_N};
      HrLinear linear{codes.q, x.block.data, x.stride, &part, 1, HR_ROWS_N};
      HrRecord records[] = {{HR_OP_QUANTISE, 0, &quantise}, {HR_OP_LINEAR, 0, &linear}};
      fuzz::by_all(teams, count, records + dense, 2 - dense, fuzz::rows_of(rows, 0), [] {},
                   [&] {
                     fuzz::Bytes all = y.bytes();
                     fuzz::add(&all, codes.bytes());
                     return all;
                   });
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    printf("best: %s\n", hr_level(nullptr));
    return 0;
  }
  const int rounds = count > 2 ? atoi(arguments[2]) : 60;
  if (count > 3) g_state ^= static_cast<uint64_t>(atoll(arguments[3])) << 20;
  void* teams[2];
  for (int i = 0; i < 2; ++i)
    if (!(teams[i] = hr_team_new(i + 1, arguments[1]))) {
      printf("no level %s\n", arguments[1]);
      return 3;
    }
  g_one_nan = true;
  fuzz::g_told = print;
  fuzz::g_now = "products";
  products(teams, 2);
  fuzz::everything(teams, 2, rounds);
  for (void* team : teams) hr_team_free(team);
  puts("all right");
  return 0;
}
