# Installs the package in each layout that distributions have, and lets CMake and pkg-config find its headers there.
# run.sh sources it.

# Outside of the source: CMake exports no absolute folder within it.
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
layouts=()  # NAME;FOLDER OF PACKAGE FILES;FOLDER OF HEADERS, for the project that finds all of them
install_layout() {  # install_layout NAME OPTIONS...: into prefix/ of a folder of its own, for which @ stands in options
  name=$1 at=$place/${1/space/a space}
  local options=("${@:2}")
  "$cmake" -S "$root" -B "$work/build" -DCMAKE_INSTALL_PREFIX="$at/prefix" "${options[@]//@/$at}" >"$work/log" 2>&1 &&
    "$cmake" --install "$work/build" >>"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
  rm -r "$work/build"
}
has() {  # has INCLUDE DATA: where headers and package files have to be, below @
  local include=$at/$1 data=$at/$2 file
  layouts+=("$name;$data/cmake/chunkattn;$include")
  for file in "$include/chunkattn/version.hpp" "$data/cmake/chunkattn/chunkattn-config.cmake" "$data/pkgconfig/chunkattn.pc"; do
    [ -e "$file" ] || { echo "FAILED: layout $name has no $file"; exit 1; }
  done
  by_pkg_config "$include" "$data/pkgconfig"
}
by_pkg_config() {  # by_pkg_config INCLUDE FOLDER: what it says there makes the compiler find the headers of INCLUDE
  [ -n "$with_pkg_config" ] || return 0
  local flags found
  eval "flags=($(PKG_CONFIG_LIBDIR=$2 pkg-config --cflags --libs chunkattn))"
  found=$(echo '#include <chunkattn/version.hpp>' | "$cxx" -x c++ -E - "${flags[@]}" 2>&1 |
    sed -n 's/^# 1 "\(.*version.hpp\)".*/\1/p') || true
  [ -n "$found" ] && [ "$(realpath "$found")" = "$1/chunkattn/version.hpp" ] ||
    { echo "FAILED: layout $name: pkg-config says ${flags[*]}, which finds ${found:-nothing}"; exit 1; }
}
moved() {  # a copy, which must name itself and not where it came from
  mkdir -p "$place/moved"
  cp -r "$at" "$place/moved/"
  at=$place/moved/$name name=moved_$name
}

with_pkg_config=$(command -v pkg-config || true)
[ -n "$with_pkg_config" ] || echo "without pkg-config: its files were only looked for"
install_layout plain && has prefix/include prefix/share
moved && has prefix/include prefix/share
install_layout space && has prefix/include prefix/share
install_layout include -DCMAKE_INSTALL_INCLUDEDIR=include/chunkattn-0 && has prefix/include/chunkattn-0 prefix/share
moved && has prefix/include/chunkattn-0 prefix/share
install_layout data -DCMAKE_INSTALL_DATADIR=lib/noarch/share && has prefix/include prefix/lib/noarch/share
moved && has prefix/include prefix/lib/noarch/share
install_layout dataroot -DCMAKE_INSTALL_DATAROOTDIR=data && has prefix/include prefix/data
install_layout multiarch -DCMAKE_INSTALL_LIBDIR=lib/x86_64-linux-gnu && has prefix/include prefix/share
install_layout absolute_lib -DCMAKE_INSTALL_LIBDIR=@/lib && has prefix/include prefix/share
install_layout absolute_include -DCMAKE_INSTALL_INCLUDEDIR=@/dev/include && has dev/include prefix/share
install_layout include_inside -DCMAKE_INSTALL_INCLUDEDIR=@/prefix/include && has prefix/include prefix/share
install_layout absolute_data -DCMAKE_INSTALL_DATADIR=@/data/share && has prefix/include data/share
install_layout both -DCMAKE_INSTALL_INCLUDEDIR=@/dev/include -DCMAKE_INSTALL_DATADIR=@/data/share && has dev/include data/share
install_layout root_data -DCMAKE_INSTALL_DATAROOTDIR=@/data/share && has prefix/include data/share
# By a stage, as packagers do: relative folders are found in it, absolute ones when they are in their place.
DESTDIR=$place/stage install_layout destdir
at=$place/stage$at && has prefix/include prefix/share
# A cross compiler's pkg-config is told where the stage is.
PKG_CONFIG_SYSROOT_DIR=$place/stage by_pkg_config "$at/prefix/include" "$at/prefix/share/pkgconfig"
DESTDIR=$place/stage install_layout destdir_absolute -DCMAKE_INSTALL_INCLUDEDIR=@/dev/include -DCMAKE_INSTALL_DATADIR=@/data/share
mv "$place/stage$at" "$at" && has dev/include data/share

# A project that exports a library that needs ours, with and without the option that README names.
parent=("$cmake" -S "$here/layouts/parent" -DCHUNKATTN_ROOT="$root" -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_INSTALL_PREFIX="$place/parent")
"${parent[@]}" -B "$work/build_parent" -DAS_README_SAYS=ON >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$cmake" --install "$work/build_parent" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
if "${parent[@]}" -B "$work/build_parent_without" >"$work/log" 2>&1; then
  echo "FAILED: a project exports what needs this library without installing it"
  exit 1
fi
name=parent at=$place/parent && has include share

"$cmake" -S "$here/layouts" -B "$work/build" -DCMAKE_CXX_COMPILER="$cxx" "-DLAYOUTS=$(IFS='|' && echo "${layouts[*]}")" \
  -DPARENT="$place/parent" || exit 1
"$cmake" --build "$work/build" || exit 1
echo "${#layouts[@]} layouts: find_package${with_pkg_config:+ and pkg-config} find the headers in each"
