#!/bin/bash
read -r word < word.txt
for ((i = ${#word} - 1; i >= 0; i--)); do answer+=${word:i:1}; done
echo "$answer" > answer.txt
rm scratch.txt
