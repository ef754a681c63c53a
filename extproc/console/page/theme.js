// Runs before the first paint, so that the page does not flash in the other colours. "auto" is what the system says.
(() => {
  try {
    const wanted = localStorage.getItem("tidegate.theme");
    if (wanted === "light" || wanted === "dark") document.documentElement.dataset.theme = wanted;
  } catch {
    // A browser that keeps nothing: as the system says.
  }
})();
