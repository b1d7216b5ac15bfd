// writer: a guest of one boot sector that never stops writing its memory, for live migration.
//
// It fills BUSY_SIZE bytes with the number of the round: the first word of each page, then the second of each, and so
// on, so that every page changes all the time. Before it overwrites a word it checks that the word still holds the round
// before: the guest itself sees, at most a round later, what a migration brought over stale, torn or not at all.
// QUIET_SIZE bytes are written once, each word with its address, and checked each round. Then it prints the number of
// the round on the first serial port, eight hexadecimal digits, a space and a newline. At a wrong word it prints "BAD",
// the word's address and what it found, and stops.
//
//     as --32 -o writer.o writer.s && ld -m elf_i386 -Ttext 0x7c00 --oformat binary -o writer.img writer.o

        .set    BUSY, 1 << 20
        .set    BUSY_SIZE, 4 << 20
        .set    QUIET, 16 << 20
        .set    QUIET_SIZE, 64 << 20
        .set    PAGE, 4096
        .set    SERIAL, 0x3f8

        .code16
        .globl  _start
_start:
        cli
        xorw    %ax, %ax
        movw    %ax, %ds
        movw    %ax, %ss
        movw    $0x7c00, %sp
        // Address line 20, where the firmware has not enabled it.
        inb     $0x92, %al
        orb     $2, %al
        andb    $0xfe, %al
        outb    %al, $0x92
        lgdtl   table
        movl    %cr0, %eax
        orl     $1, %eax
        movl    %eax, %cr0
        ljmpl   $8, $flat

        .code32
flat:
        movw    $16, %ax
        movw    %ax, %ds
        movw    %ax, %es
        movw    %ax, %ss
        cld
        movl    $BUSY, %edi
        movl    $BUSY_SIZE / 4, %ecx
        xorl    %eax, %eax
        rep stosl
        movl    $QUIET, %edi
lay:    movl    %edi, (%edi)
        addl    $4, %edi
        cmpl    $QUIET + QUIET_SIZE, %edi
        jne     lay
        // ebp: the round that is in memory.
        xorl    %ebp, %ebp
round:
        leal    1(%ebp), %ebx
        movl    $BUSY, %ecx
sweep:
        movl    %ecx, %edi
write:
        cmpl    %ebp, (%edi)
        jne     bad
        movl    %ebx, (%edi)
        addl    $PAGE, %edi
        cmpl    $BUSY + BUSY_SIZE, %edi
        jb      write
        addl    $4, %ecx
        cmpl    $BUSY + PAGE, %ecx
        jne     sweep
        movl    %ebx, %ebp
        movl    $QUIET, %edi
check:
        cmpl    %edi, (%edi)
        jne     bad
        addl    $4, %edi
        cmpl    $QUIET + QUIET_SIZE, %edi
        jne     check
        movl    %ebp, %eax
        call    print
        call    newline
        jmp     round

bad:
        movl    $'B', %eax
        call    send
        movl    $'A', %eax
        call    send
        movl    $'D', %eax
        call    send
        movl    $' ', %eax
        call    send
        movl    %edi, %eax
        call    print
        movl    (%edi), %eax
        call    print
        call    newline
stop:   hlt
        jmp     stop

// eax in eight digits, and a space.
print:
        movl    %eax, %esi
        movl    $8, %ecx
digit:
        roll    $4, %esi
        movl    %esi, %eax
        andl    $15, %eax
        movb    digits(%eax), %al
        call    send
        decl    %ecx
        jnz     digit
        movl    $' ', %eax
        jmp     send
newline:
        movl    $'\n', %eax
// al, when the port has room.
send:
        movb    %al, %ah
        movw    $SERIAL + 5, %dx
full:   inb     %dx, %al
        testb   $0x20, %al
        jz      full
        movw    $SERIAL, %dx
        movb    %ah, %al
        outb    %al, %dx
        ret

digits: .ascii  "0123456789abcdef"
        .balign 8
// Nothing, code, data: all of four GiB.
gdt:    .quad   0, 0x00cf9a000000ffff, 0x00cf92000000ffff
table:  .word   table - gdt - 1
        .long   gdt

        .org    510
        .word   0xaa55
