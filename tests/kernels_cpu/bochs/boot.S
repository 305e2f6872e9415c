# A ROM of 64 KiB at 0xffff0000: from the reset vector to long mode, tiles enabled, then the guest.
# Memory below 4 GiB is mapped where it lies. There are no interrupts and no system.
.code16
.globl start16
start16:
  cli
  lgdtl %cs:gdt_pointer - start16
  mov %cr0, %eax
  or $1, %eax
  mov %eax, %cr0
  ljmpl $0x08, $start32

.code32
start32:
  mov $0x10, %ax
  mov %ax, %ds
  mov %ax, %es
  mov %ax, %ss
  # The first table at 0x1000, the second at 0x2000, four directories of 2 MiB pages from 0x3000 on.
  mov $0x1000, %edi
  mov $0x6000, %ecx
  xor %eax, %eax
  rep stosb
  movl $0x2003, 0x1000
  movl $0x3003, 0x2000
  movl $0x4003, 0x2008
  movl $0x5003, 0x2010
  movl $0x6003, 0x2018
  mov $0x3000, %edi
  mov $0x83, %eax
  mov $2048, %ecx
1:
  mov %eax, (%edi)
  add $0x200000, %eax
  add $8, %edi
  loop 1b
  mov $0x40620, %eax       # PAE, OSFXSR, OSXMMEXCPT, OSXSAVE
  mov %eax, %cr4
  mov $0x1000, %eax
  mov %eax, %cr3
  mov $0xc0000080, %ecx    # EFER: long mode
  rdmsr
  or $0x100, %eax
  wrmsr
  mov $0x80000033, %eax    # paging, native floating point errors, protection
  mov %eax, %cr0
  ljmp $0x18, $start64

.code64
start64:
  xor %ecx, %ecx
  mov $0x600e7, %eax       # XCR0: x87, SSE, AVX, AVX-512, tiles
  xor %edx, %edx
  xsetbv
  mov $0x0f000000, %rsp
  mov $0x01000000, %rax
  call *%rax
1:
  hlt
  jmp 1b

.align 16
gdt:
  .quad 0
  .quad 0x00cf9b000000ffff # code of 32 bits
  .quad 0x00cf93000000ffff # data
  .quad 0x00af9b000000ffff # code of 64 bits
gdt_pointer:
  .word 31
  .long gdt

.org 0xfff0
.code16
  ljmp $0xf000, $0         # the reset vector; the ROM also lies at 0xf0000
.org 0xffff
  .byte 0
